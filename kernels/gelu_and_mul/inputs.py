"""Seeded inputs of gelu_and_mul, one regime at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "large", "small", "one-sided", "ramp", "zeros")
"""`normal` is timed; the others test what a kernel may take for granted."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"gate", "up", "output"}` on the generator's device in the dtype of the point.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    shape = (point.axes["tokens"], point.axes["intermediate"])
    dtype: torch.dtype = getattr(torch, point.dtypes["T"])
    gate, up = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    match regime:
        case "normal":
            pass
        case "large":  # the square overflows in float16
            gate = gate * 60
        case "small":  # the activation is half of what it is of
            gate, up = gate * 1e-3, up * 1e-1
        case "one-sided":  # below zero, where 1 + erf cancels
            gate = -gate.abs() * 4
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            columns = torch.linspace(-6.0, 6.0, shape[1], device=device)
            gate = columns.expand(shape)
            up = 1 + torch.arange(shape[0], device=device).unsqueeze(1) / 8 + up / 64
        case "zeros":
            gate = torch.zeros_like(gate)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "gate": gate.to(dtype).contiguous(),
        "up": up.to(dtype).contiguous(),
        "output": torch.zeros(shape, dtype=dtype, device=device),
    }
