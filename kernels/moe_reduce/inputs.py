"""Seeded inputs of moe_reduce, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "skipped", "ramp", "cancellation")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"rows", "row_map", "scales", "output"}` on the generator's device in the point's dtypes.

    Each choice of a token has its own row, in random order.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    rows_dtype, dtype, scale_dtype = (getattr(torch, point.dtypes[s]) for s in ("X", "T", "S"))
    tokens, top_k, hidden = axes["tokens"], axes["top_k"], axes["hidden"]
    count = tokens * top_k + axes["spare"]
    rows = torch.randn(axes["splits"], count, hidden, generator=generator, device=device)
    order = torch.randperm(count, generator=generator, device=device)[: tokens * top_k]
    logits = torch.randn(axes["scaled"] * tokens, top_k, generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "skipped":  # some choices, and all of one token, are padding or belong to other nodes
            away = torch.rand(tokens * top_k, generator=generator, device=device) < 0.3
            away[:top_k] = True
            away |= (order == 0) | (order == count - 1)  # where a clamped or wrapped -1 would read
            unread = torch.ones(count, dtype=torch.bool, device=device)
            unread[order[~away]] = False
            rows[:, unread] = math.nan
            order = order.masked_fill(away, -1)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            rows = (
                torch.linspace(-1.0, 1.0, hidden, device=device).expand_as(rows)
                + torch.arange(count, device=device).unsqueeze(1) / 8
            )
        case "cancellation":  # large rows whose sum is small
            halves = rows[:, order[0::2]] if top_k % 2 == 0 else None
            if halves is not None:
                small = halves.shape[1]
                rows[:, order[1::2][:small]] = -halves * (1 + 2**-6)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "rows": rows.to(rows_dtype).contiguous(),
        "row_map": order.view(tokens, top_k).to(torch.int32),
        "scales": torch.softmax(logits, -1).to(scale_dtype),
        "output": torch.full((tokens, hidden), math.nan, device=device).to(dtype),
    }
