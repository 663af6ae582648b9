"""Seeded inputs of rms_norm_quant_fp8, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "gains", "spikes", "ramp", "faint", "zeros", "inf", "nan")
"""`normal` is timed."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes. The contract
    says nothing of a row with NaN or infinity: those regimes plant large numbers.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    tokens, groups, group = axes["tokens"], axes["groups"], axes["group"]
    wide = groups * group
    rows = torch.randn(tokens, wide, generator=generator, device=device)
    weight = 1.0 + 0.25 * torch.randn(wide, generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "gains":  # each group another scale by its weights, so that another's scale shows
            weight = weight * torch.exp2(torch.arange(wide, device=device) // group % 9 - 4.0)
        case "spikes":  # one element dominates the norm of its row, and the scale of its group
            column = torch.randint(0, wide, (tokens, 1), generator=generator, device=device)
            rows = (rows * 0.05).scatter(1, column, 60.0)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            rows = (
                torch.linspace(-1.0, 1.0, wide, device=device).expand(tokens, wide)
                + torch.arange(tokens, device=device).unsqueeze(1) / 8
            )
        case "faint":  # epsilon dominates, and the scale is the least
            rows = rows * 2e-7
        case "zeros":
            rows = torch.zeros_like(rows)
        case "inf" | "nan":
            rows[:, 0] = 60000.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    stored = torch.full((tokens, wide), math.nan, device=device)
    return {
        "input": rows.to(getattr(torch, point.dtypes["T"])).contiguous(),
        "weight": weight.to(getattr(torch, point.dtypes["W"])),
        "output": stored.to(getattr(torch, point.dtypes["Q"])),
        "scales": torch.full((tokens, groups), math.nan, device=device),
    }
