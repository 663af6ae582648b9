"""Seeded inputs of matmul_mxfp4."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "ramp")
BLOCK = 32


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "weights", "scales", "out"}` on the generator's device.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    rows, columns, depth = (point.axes[axis] for axis in ("rows", "columns", "depth"))
    x = torch.randn(rows, depth, generator=generator, device=device)
    packed = torch.randint(
        0, 256, (columns, depth // 2), generator=generator, device=device, dtype=torch.uint8
    )
    spread = torch.randint(
        -4, 5, (columns, depth // BLOCK), generator=generator, device=device, dtype=torch.int32
    )
    if regime == "ramp":  # position-coded: a number or a scale in the wrong place shows
        x = torch.linspace(-1.0, 1.0, depth, device=device).expand(rows, depth).contiguous()
        spread = torch.arange(spread.numel(), device=device).view(spread.shape) % 9 - 4
    elif regime != "normal":
        raise ValueError(f"unknown regime {regime!r}")
    return {
        "x": x,
        "weights": packed.view(torch.float4_e2m1fn_x2),
        "scales": torch.exp2(spread.float()).to(getattr(torch, point.dtypes["S"])),
        "out": x.new_full((rows, columns), torch.nan),
    }
