"""Seeded inputs of fused_add_rms_norm, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "large", "small", "cancellation", "spikes", "ramp", "zeros")
"""`normal` is timed; the others test what a kernel may take for granted."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"input", "residual", "weight"}` on the generator's device in the dtypes of the point.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    shape = (point.axes["tokens"], point.axes["hidden"])
    dtype, weight_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "W"))
    added = torch.randn(shape, generator=generator, device=device)
    residual = torch.randn(shape, generator=generator, device=device)
    weight = 1.0 + 0.25 * torch.randn(shape[1], generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "large":  # squares stay finite in float32, not in float16
            added, residual = added * 1e3, residual * 1e3
        case "small":  # epsilon dominates
            added, residual = added * 1e-3, residual * 1e-3
        case "cancellation":
            residual = -added + residual * 2**-6
        case "spikes":  # one element per row dominates the norm
            column = torch.randint(0, shape[1], (shape[0], 1), generator=generator, device=device)
            added = added * 0.05
            residual = (residual * 0.05).scatter(1, column, 60.0)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            added = (
                torch.linspace(-1.0, 1.0, shape[1], device=device).expand(shape)
                + torch.arange(shape[0], device=device).unsqueeze(1) / 8
            )
        case "zeros":
            added, residual = torch.zeros_like(added), torch.zeros_like(residual)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "input": added.to(dtype).contiguous(),
        "residual": residual.to(dtype).contiguous(),
        "weight": weight.to(weight_dtype),
    }
