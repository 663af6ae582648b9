"""Seeded inputs of scaled_add."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal",)


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "y", "out"}` on the generator's device; `out` is NaN until it is written."""
    device, dtype, n = generator.device, getattr(torch, point.dtypes["T"]), point.axes["n"]
    x, y = (torch.randn(n, generator=generator, device=device).to(dtype) for _ in range(2))
    return {"x": x, "y": y, "out": torch.full((n,), math.nan, device=device, dtype=dtype)}
