"""Seeded inputs of add_rms_norm_route, one regime at a time."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_ROUTE = runpy.run_path(str(Path(__file__).parent.parent / "moe_route" / "inputs.py"))

REGIMES = ("normal", "cancellation", "spikes", "tied", "crowded", "close", "last", "ones", "large")
"""`normal` is timed; the judge adds generic regimes (zeros, NaN, ...). Its `ones` would give all
experts one logit, and its `large` overflow, both of which rounding alone decides."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes.

    Outputs hold garbage: integers that look plausible.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, weight_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "W"))
    tokens, hidden, experts = axes["tokens"], axes["hidden"], axes["experts"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    added, residual = normal(tokens, hidden), normal(tokens, hidden)
    weight = 1.0 + 0.25 * normal(hidden)
    router = 2.0 * normal(experts, hidden) / math.sqrt(hidden)
    bias = normal(axes["biased"] * experts)
    match regime:
        case "normal":
            pass
        case "cancellation":  # the residual nearly vanishes
            residual = -added + residual * 2**-6
        case "spikes":  # eight elements per row dominate norm and logits
            columns = torch.rand(tokens, hidden, generator=generator, device=device)
            added = added * 0.05
            residual = (residual * 0.05).scatter(1, columns.argsort(1)[:, :8], 20.0)
        case "tied":  # a quarter of the experts have the logits of the one before
            router[1::4] = router[0::4][: len(router[1::4])]
            if len(bias):
                bias[1::4] = bias[0::4][: len(bias[1::4])]
        case "crowded":  # every token chooses nearly the same experts, so that tiles are full
            added, residual = added[:1] + added * 0.02, residual[:1] + residual * 0.02
        case "close":  # where there is a bias: logits that are often equal once they are rounded
            router, bias = router * 0.02, 4.0 + bias * 0.02
        case "ones":
            added, residual = torch.ones_like(added), torch.ones_like(residual)
            weight = torch.ones_like(weight)
        case "large":  # squares stay finite in float32, not in float16
            factor = 16.0 if dtype is torch.float16 else 1e3
            added, residual = added * factor, residual * factor
        case "last":  # choices at either end of a row
            ends = torch.tensor([0, experts - 1], device=device)
            added, residual = added.abs(), residual.abs()
            router[ends] = router[ends].abs() + 0.5
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    tables = _ROUTE["make"](point, generator, "normal")
    return {
        "input": added.to(dtype).contiguous(),
        "residual": residual.to(dtype).contiguous(),
        "weight": weight.to(weight_dtype),
        "router_weight": router.to(dtype).contiguous(),
        "router_bias": bias.to(dtype),
        **tables,
        "logits": torch.full((tokens, experts), math.nan, device=device).to(dtype),
    }
