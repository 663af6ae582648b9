"""Seeded inputs of linear, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "cancellation", "spikes", "ramp")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtype.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype = getattr(torch, point.dtypes["T"])
    tokens, inner, outer = axes["tokens"], axes["inner"], axes["outer"]
    x = torch.randn(tokens, inner, generator=generator, device=device)
    weight = torch.randn(outer, inner, generator=generator, device=device) / math.sqrt(inner)
    bias = torch.randn(axes["biased"] * outer, generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "cancellation":  # one half of a sum cancels the other
            half = inner // 2
            x[:, half : 2 * half] = -x[:, :half]
            weight[:, half : 2 * half] = weight[:, :half] * (1 + 2**-6)
        case "spikes":  # one element per row dominates the sum
            column = torch.randint(0, inner, (tokens, 1), generator=generator, device=device)
            x = (x * 0.05).scatter(1, column, 60.0)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            x = torch.linspace(-1.0, 1.0, inner, device=device).expand(tokens, inner).clone()
            x += torch.arange(tokens, device=device).unsqueeze(1) / 8
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "x": x.to(dtype),
        "weight": weight.to(dtype),
        "bias": bias.to(dtype),
        "output": torch.full((tokens, outer), math.nan, dtype=dtype, device=device),
    }
