"""Seeded inputs of gemma_rms_norm, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "large", "small", "spikes", "ramp", "zeros")
"""`normal` is timed; the others test what a kernel may take for granted."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"input", "weight", "output"}` on the generator's device in the dtypes of the point.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    shape = (point.axes["tokens"], point.axes["hidden"])
    dtype, weight_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "W"))
    rows = torch.randn(shape, generator=generator, device=device)
    weight = 0.25 * torch.randn(shape[1], generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "large":  # squares stay finite in float32, not in float16
            rows = rows * 1e3
        case "small":  # epsilon dominates
            rows = rows * 1e-4
        case "spikes":  # one element per row dominates the norm
            column = torch.randint(0, shape[1], (shape[0], 1), generator=generator, device=device)
            rows = (rows * 0.05).scatter(1, column, 60.0)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            rows = (
                torch.linspace(-1.0, 1.0, shape[1], device=device).expand(shape)
                + torch.arange(shape[0], device=device).unsqueeze(1) / 8
            )
        case "zeros":
            rows = torch.zeros_like(rows)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "input": rows.to(dtype).contiguous(),
        "weight": weight.to(weight_dtype),
        "output": torch.zeros(shape, dtype=dtype, device=device),
    }
