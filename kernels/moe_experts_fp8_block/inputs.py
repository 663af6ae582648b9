"""Seeded inputs of moe_experts_fp8_block, one regime at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "agreed", "scales", "skipped", "inf", "nan")
"""`normal` is timed."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract in the point's dtypes; `inf` and `nan`, which mean nothing, plant
    large numbers.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    tokens, experts, top_k, block = (axes[name] for name in ("tokens", "experts", "top_k", "block"))
    hidden, inner = axes["depth"] * block, axes["wide"] * block

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, scores = normal(tokens, hidden), normal(tokens, experts)
    w1 = normal(experts, 2 * inner, hidden) * (2 / math.sqrt(hidden))
    w2 = normal(experts, hidden, inner) / math.sqrt(inner)
    match regime:
        case "normal" | "skipped":
            pass
        case "agreed":  # all tokens take the same experts
            scores = scores[:1].expand(tokens, experts)
        case "scales":  # neighbouring blocks differ much, so that another block's scale shows
            for weight in (w1, w2):
                for axis in (1, 2):
                    step = torch.arange(weight.shape[axis], device=device) // block % 3 * 2.0
                    weight *= torch.exp2(step.unsqueeze(1) if axis == 1 else -step)
        case "inf" | "nan":
            x[:, 0] = 1000.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    top = scores.topk(top_k, 1)
    ids = top.indices
    if regime == "skipped":  # choices of experts, and the rows that pad a batch
        ids[::2, 1:2] = -1
        ids[(tokens + 1) // 2 :] = -1
    dtype, stored, index = (getattr(torch, point.dtypes[symbol]) for symbol in "TQI")
    first, second = _stored(w1, block, stored), _stored(w2, block, stored)
    return {
        "x": x.to(dtype),
        "w1": first[0],
        "w1_scale": first[1],
        "w2": second[0],
        "w2_scale": second[1],
        "gains": top.values.softmax(1),
        "ids": ids.to(index),
        "output": torch.full((tokens, hidden), math.nan, dtype=dtype, device=device),
    }


def _stored(weight: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers in fp8, and the scale of each block."""
    tiles = weight.unflatten(2, (-1, block)).unflatten(1, (-1, block))
    scale = tiles.abs().amax((2, 4)).clamp_min(1e-10) / 448
    codes = (tiles / scale[:, :, None, :, None]).clamp(-448, 448).to(dtype)
    return codes.view(weight.shape), scale
