"""Seeded inputs of linear_fp8, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "cancellation", "spikes", "ramp", "scales")
"""`normal` is timed."""
LARGEST = 448.0
"""Of float8_e4m3fn."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    tokens, blocks, block, outer = (axes[name] for name in ("tokens", "blocks", "block", "outer"))
    inner = blocks * block
    x = torch.randn(tokens, inner, generator=generator, device=device)
    weight = torch.randn(outer, inner, generator=generator, device=device) / math.sqrt(inner)
    match regime:
        case "normal":
            pass
        case "cancellation":  # one half of a sum cancels most of the other
            half = inner // 2
            x[:, half : 2 * half] = -x[:, :half]
            weight[:, half : 2 * half] = weight[:, :half] * (1 + 2**-2)
        case "spikes":  # one element per row dominates the sum, and its block's scale
            column = torch.randint(0, inner, (tokens, 1), generator=generator, device=device)
            x = (x * 0.05).scatter(1, column, 60.0)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            x = torch.linspace(-1.0, 1.0, inner, device=device).expand(tokens, inner).clone()
            x += torch.arange(tokens, device=device).unsqueeze(1) / 8
        case "scales":  # neighbouring blocks differ much, so that another block's scale shows
            steps = torch.arange(inner, device=device) // block
            x = x * torch.exp2(steps % 7 - 3.0)
            rows = torch.arange(outer, device=device).unsqueeze(1) // block
            weight = weight * torch.exp2((rows + 2 * steps) % 9 - 4.0)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    x_scale = x.unflatten(1, (blocks, block)).abs().amax(-1).clamp_min(1e-10) / LARGEST
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outer % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (blocks, block))
    weight_scale = tiles.abs().amax((1, 3)).clamp_min(1e-10) / LARGEST
    spread = weight_scale.repeat_interleave(block, 0)[:outer].repeat_interleave(block, 1)
    stored = getattr(torch, point.dtypes["Q"])
    dtype = getattr(torch, point.dtypes["T"])
    return {
        "x": (x / x_scale.repeat_interleave(block, 1)).clamp(-LARGEST, LARGEST).to(stored),
        "x_scale": x_scale,
        "weight": (weight / spread).clamp(-LARGEST, LARGEST).to(stored),
        "weight_scale": weight_scale,
        "output": torch.full((tokens, outer), math.nan, dtype=dtype, device=device),
    }
