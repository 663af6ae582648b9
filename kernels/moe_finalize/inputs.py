"""Seeded inputs of moe_finalize, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "crowded", "ramp", "cancellation")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"rows", "row_map", "scales", "bias", "experts", "output"}` on the generator's device in the
    point's dtypes.

    The map is for rows sorted by expert, as an engine permutes them.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, scale_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "S"))
    tokens, top_k, hidden, count = (axes[n] for n in ("tokens", "top_k", "hidden", "experts"))
    rows = torch.randn(tokens * top_k, hidden, generator=generator, device=device)
    bias = torch.randn(axes["biased"] * count, hidden, generator=generator, device=device)
    logits = torch.randn(tokens, count, generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "crowded":  # every token chooses the same experts
            logits = logits[:1].expand(tokens, count).contiguous()
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            rows = torch.linspace(-1.0, 1.0, hidden, device=device).expand_as(rows) + (
                torch.arange(tokens * top_k, device=device).unsqueeze(1) / 8
            )
        case "cancellation":  # the bias cancels most of the row
            rows, bias = 1 + rows * 2**-6, bias * 2**-6 - 1
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    chosen = logits.topk(top_k)
    position = torch.argsort(torch.argsort(chosen.indices.flatten(), stable=True), stable=True)
    return {
        "rows": rows.to(dtype),
        "row_map": position.view(tokens, top_k).t().contiguous().to(torch.int32),
        "scales": torch.softmax(chosen.values, -1).to(scale_dtype),
        "bias": bias.to(dtype),
        "experts": chosen.indices.to(torch.int32),
        "output": torch.full((tokens, hidden), math.nan, device=device).to(dtype),
    }
