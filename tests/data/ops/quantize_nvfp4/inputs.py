"""Seeded inputs of quantize_nvfp4."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "ramp", "inf", "nan")


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "packed", "scales"}` on the generator's device. The contract says nothing of NaN and
    infinities in a block, whose scale would have to be both: those regimes plant large numbers.

    Raises:
        ValueError: unknown regime.
    """
    device, rows, n = generator.device, point.axes["rows"], point.axes["n"]
    x = torch.randn(rows, n, generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "ramp":  # each block another scale
            x = x * torch.exp2(torch.arange(n, device=device) // 16 % 8 - 4.0)
        case "inf" | "nan":  # beyond 6 * 448: cut off
            x[:, 0] = 1e6
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    packed = torch.zeros(rows, n // 2, dtype=torch.uint8, device=device)
    return {
        "x": x.to(getattr(torch, point.dtypes["T"])),
        "packed": packed.view(torch.float4_e2m1fn_x2),
        "scales": torch.ones(rows, n // 16, device=device).to(torch.float8_e4m3fn),
    }
