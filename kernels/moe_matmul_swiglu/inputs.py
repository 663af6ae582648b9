"""Seeded inputs of moe_matmul_swiglu, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "crowded", "ends", "scales", "clamped")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""
SCALES = 118, 124
"""Range of the biased exponents (127 for 1) of gpt-oss's weights."""


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
    experts, hidden, inner = axes["experts"], axes["hidden"], axes["inner"]
    tables = routed(axes["tokens"], axes["top_k"], experts, generator, regime)
    x = torch.randn(axes["tokens"], hidden, generator=generator, device=device)
    bias = torch.randn(experts, 2 * inner, generator=generator, device=device)
    if regime == "clamped":  # most sums exceed the limit
        x *= 16.0
    rows = axes["tokens"] * axes["top_k"]
    return {
        "x": x.to(dtype),
        **packed(experts, 2 * inner, hidden, generator, regime),
        "bias": bias,
        **tables,
        "output": torch.full((rows, inner), math.nan, dtype=dtype, device=device),
    }


def packed(
    experts: int, columns: int, depth: int, generator: torch.Generator, regime: str
) -> dict[str, Tensor]:
    """`weights` and `scales` in their memory layout; any 32-bit word is eight FP4 numbers."""
    low, high = (90, 124) if regime == "scales" else SCALES
    device = generator.device

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, generator=generator, device=device, dtype=torch.uint8
        )

    scales = drawn(low, high, experts, (columns + 255) // 256 * 8, depth)
    row = torch.arange(scales.shape[1], device=device).unsqueeze(1)
    at = torch.arange(depth, device=device)
    column = row // 8 * 256 + at // 32 % 2 * 128 + row % 8 * 16 + at % 2 * 8 + at // 4 % 8
    return {
        "weights": drawn(0, 256, experts, columns // 4, depth * 2),
        "scales": scales * (column < columns),
    }


def routed(
    tokens: int, top_k: int, experts: int, generator: torch.Generator, regime: str
) -> dict[str, Tensor]:
    """The tables of a router in which each token chooses `top_k` experts at random.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    logits = torch.rand(tokens, experts, generator=generator, device=device)
    match regime:
        case "normal" | "scales" | "clamped":
            pass
        case "crowded":  # all tokens choose the same experts: full tiles, empty experts
            logits[:] = logits[:1].clone()
        case "ends":  # the first and the last expert, which a loop may miss
            logits[:, 0] += 1.0
            logits[:, -1] += 2.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    flat = logits.topk(top_k, 1).indices.sort(1).values.flatten()
    counts = torch.bincount(flat, minlength=experts)
    tiles = (counts + 15) // 16
    expert = torch.repeat_interleave(torch.arange(experts, device=device), tiles)
    block = torch.arange(len(expert), device=device) - (tiles.cumsum(0) - tiles)[expert]
    gates = tokens * top_k
    most = min(gates, experts - 1 + (gates - experts + 16) // 16)
    tile_map = torch.full((most,), -1, dtype=torch.int32, device=device)
    tile_map[: len(expert)] = (block * 65536 + expert).int()
    return {
        "gather_index": torch.argsort(flat, stable=True).int(),
        "histogram": counts.int(),
        "token_offsets": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        "tile_map": tile_map,
    }
