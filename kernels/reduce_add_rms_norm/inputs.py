"""Seeded inputs of reduce_add_rms_norm, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "skipped", "ramp", "cancellation", "spikes", "small")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"rows", "row_map", "residual", "weight", "output"}` on the generator's device in the
    point's dtypes.

    Each choice of a token has its own row, in random order.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, weight_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "W"))
    tokens, top_k, hidden = axes["tokens"], axes["top_k"], axes["hidden"]
    count = tokens * top_k + axes["spare"]
    rows = torch.randn(count, hidden, generator=generator, device=device) / math.sqrt(top_k)
    residual = torch.randn(tokens, hidden, generator=generator, device=device)
    weight = 1.0 + 0.25 * torch.randn(hidden, generator=generator, device=device)
    order = torch.randperm(count, generator=generator, device=device)[: tokens * top_k]
    match regime:
        case "normal":
            pass
        case "skipped":  # some choices, and all of one token, are padding or belong to other nodes
            away = torch.rand(tokens * top_k, generator=generator, device=device) < 0.3
            away[:top_k] = True
            away |= (order == 0) | (order == count - 1)  # where a clamped or wrapped -1 would read
            unread = torch.ones(count, dtype=torch.bool, device=device)
            unread[order[~away]] = False
            rows[unread] = math.nan
            order = order.masked_fill(away, -1)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            rows = (
                torch.linspace(-1.0, 1.0, hidden, device=device).expand_as(rows)
                + torch.arange(count, device=device).unsqueeze(1) / 8
            )
        case "cancellation":  # the sum cancels nearly all of the residual
            last = order.view(tokens, top_k)[:, -1]
            rest = rows[order.view(tokens, top_k)[:, :-1]].sum(1)
            rows[last] = -residual * (1 - 2**-6) - rest
        case "spikes":  # one element per row dominates the norm
            column = torch.randint(0, hidden, (tokens, 1), generator=generator, device=device)
            rows = rows * 0.05
            residual = (residual * 0.05).scatter(1, column, 60.0)
        case "small":  # epsilon dominates
            rows, residual = rows * 1e-3, residual * 1e-3
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "rows": rows.to(dtype),
        "row_map": order.view(tokens, top_k).to(torch.int32),
        "residual": residual.to(dtype),
        "weight": weight.to(weight_dtype),
        "output": torch.full((tokens, hidden), math.nan, device=device).to(dtype),
    }
