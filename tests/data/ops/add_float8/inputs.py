"""Seeded inputs of add_float8."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "ramp")


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "y", "out"}` on the generator's device.

    Raises:
        ValueError: unknown regime.
    """
    device, dtype = generator.device, getattr(torch, point.dtypes["T"])
    shape = (point.axes["rows"], point.axes["n"])
    x, y = (4 * torch.randn(shape, generator=generator, device=device) for _ in range(2))
    if regime == "ramp":  # every exponent, and sums beyond the largest number
        largest = torch.finfo(dtype).max
        x = x * torch.logspace(-6, 0, shape[1], device=device) * largest / 8
    elif regime != "normal":
        raise ValueError(f"unknown regime {regime!r}")
    largest = torch.finfo(dtype).max
    x = x.clamp(-largest, largest)
    return {"x": x.to(dtype), "y": y.to(dtype), "out": torch.zeros(shape, device=device).to(dtype)}
