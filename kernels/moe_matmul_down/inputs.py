"""Seeded inputs of moe_matmul_down, one regime at a time."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

# the router and the packed weights are those of the matmul before
_FIRST = runpy.run_path(str(Path(__file__).parent.parent / "moe_matmul_swiglu" / "inputs.py"))
REGIMES = ("normal", "crowded", "ends", "scales")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""


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
    dtype = getattr(torch, point.dtypes["T"])
    tokens, top_k, experts = axes["tokens"], axes["top_k"], axes["experts"]
    rows, hidden, inner = tokens * top_k, axes["hidden"], axes["inner"]
    tables = _FIRST["routed"](tokens, top_k, experts, generator, regime)
    gather = tables.pop("gather_index").long()
    x = torch.randn(rows, inner, generator=generator, device=device)
    bias = torch.randn(experts, hidden, generator=generator, device=device)
    logits = torch.randn(tokens, top_k, generator=generator, device=device)
    return {
        "x": x.to(dtype),
        **_FIRST["packed"](experts, hidden, inner, generator, regime),
        "bias": bias,
        "gate_scales": torch.softmax(logits, 1).flatten()[gather].to(dtype),
        "row_map": torch.argsort(gather).int().view(tokens, top_k),
        **tables,
        "output": torch.full((rows, hidden), math.nan, dtype=dtype, device=device),
    }
