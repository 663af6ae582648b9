"""Seeded inputs of moe_route, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "tied", "crowded", "close", "last")
"""`normal` is timed; the judge adds generic regimes (zeros, ones, NaN, ...)."""


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
    dtype = getattr(torch, point.dtypes["T"])
    tokens, experts, top_k = axes["tokens"], axes["experts"], axes["top_k"]
    gates = tokens * top_k
    logits = torch.randn(tokens, experts, generator=generator, device=device)
    match regime:
        case "normal":
            logits = 2.0 * logits
        case "tied":  # few values: most rows have equal logits at the border
            logits = logits.round()
        case "crowded":  # every token chooses the same experts, tiles are full
            logits = logits * 0.01 + torch.arange(experts, device=device) % 7
        case "close":  # the choice depends on the last bits of a logit
            logits = 1.0 + logits * 2**-8
        case "last":  # choices at either end of a row
            logits[:, 0] += 20.0
            logits[:, -1] += 20.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    tiles = min(gates, experts - 1 + (gates - experts + 16) // 16)

    def garbage(*shape: int) -> Tensor:
        high = max(gates, experts)
        whole = torch.randint(0, high, shape, generator=generator, device=device)
        return whole.to(torch.int32)

    return {
        "logits": logits.to(dtype),
        "gate_scales": torch.zeros(gates, dtype=dtype, device=device),
        "gather_index": garbage(gates),
        "scatter_index": garbage(gates),
        "histogram": garbage(experts),
        "token_offsets": garbage(experts + 1),
        "tile_offsets": garbage(4, experts + 1),
        "tile_map": garbage(4, tiles),
    }
