"""Seeded inputs of linear, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "needle", "low_rank")
"""`normal` is what is timed; generic regimes (zeros, large, NaN, ...) are the judge's."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "weight", "out"}` on the generator's device; `out` is NaN until it is written.

    Raises:
        ValueError: unknown regime.
    """
    device, dtype = generator.device, getattr(torch, point.dtypes["T"])
    tokens, k, n = (point.axes[axis] for axis in ("tokens", "k", "n"))
    x = torch.randn(tokens, k, generator=generator, device=device)
    weight = torch.randn(n, k, generator=generator, device=device) / math.sqrt(k)
    match regime:
        case "normal":
            pass
        case "needle":  # what counts sits at the far end of the sum
            x[:, : max(k - 4, 0)] *= 1e-3
        case "low_rank":  # rows that differ little: an approximation by a few factors shows
            x = (1 + x[:, :1].abs()) @ x[:1] + 1e-2 * x  # no factor is small, whatever is drawn
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    out = torch.full((tokens, n), math.nan, device=device)
    return {"x": x.to(dtype), "weight": weight.to(dtype), "out": out.to(dtype)}
