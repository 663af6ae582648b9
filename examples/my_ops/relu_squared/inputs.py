"""Seeded inputs of relu_squared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal",)


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "out"}` on the generator's device; `out` is NaN until it is written."""
    device, dtype, n = generator.device, getattr(torch, point.dtypes["T"]), point.axes["n"]
    x = torch.randn(n, generator=generator, device=device).to(dtype)
    return {"x": x, "out": torch.full((n,), math.nan, device=device, dtype=dtype)}
