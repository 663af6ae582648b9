"""Seeded inputs of quantize_fp8, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "ramp", "spikes", "small", "inf", "nan")
"""`normal` is timed."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes. The contract
    says nothing of a group with NaN or infinity: those regimes plant large numbers.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    tokens, groups, group = axes["tokens"], axes["groups"], axes["group"]
    wide = groups * group
    x = torch.randn(tokens, wide, generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "ramp":  # each group another scale, each row a multiple
            steps = torch.arange(wide, device=device) // group % 9 - 4.0
            x = x * torch.exp2(steps) * (1 + torch.arange(tokens, device=device).unsqueeze(1) / 8)
        case "spikes":  # one number is far above its group
            column = torch.randint(0, wide, (tokens, 1), generator=generator, device=device)
            x = x.scatter(1, column, 3000.0)
        case "small":  # below what fp8 has without a scale
            x = x * 2.0**-12
        case "inf" | "nan":
            x[:, 0] = 60000.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    stored = torch.full((tokens, wide), math.nan, device=device)
    return {
        "x": x.to(getattr(torch, point.dtypes["T"])),
        "output": stored.to(getattr(torch, point.dtypes["Q"])),
        "scales": torch.full((tokens, groups), math.nan, device=device),
    }
