"""Seeded inputs of moe_experts, one regime at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "agreed", "signed", "skipped", "repeated", "experts", "inf")
"""`normal` is timed."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract in the point's dtypes; `inf`, which means nothing, plants large
    numbers.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    tokens, experts, top_k = (axes[name] for name in ("tokens", "experts", "top_k"))
    hidden, inner = axes["hidden"], axes["inner"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, scores = normal(tokens, hidden), normal(tokens, experts)
    gate_up = normal(experts, 2 * inner, hidden) * (2 / math.sqrt(hidden))
    down = normal(experts, hidden, inner) / math.sqrt(inner)
    match regime:
        case "normal" | "skipped" | "repeated" | "signed":
            pass
        case "agreed":  # all tokens take the same experts
            scores = scores[:1].expand(tokens, experts)
        case "experts":  # experts differ much, so that another's weights show
            down *= torch.exp2(torch.arange(experts, device=device) % 5 - 2.0)[:, None, None]
        case "inf":
            x[:, 0] = 100.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    top = scores.topk(top_k, 1)
    ids, gains = top.indices.clone(), top.values.softmax(1)
    if regime == "skipped":  # choices of other ranks, and the rows that pad a batch
        ids[::2, :1] = experts
        ids[1::2, 1:2] = -1
        ids[(tokens + 1) // 2 :] = -1
    elif regime == "repeated":
        ids[:, 1:] = ids[:, :1].roll(1, 0)
        ids[::2] = ids[::2, :1]
    elif regime == "signed":  # routers with a factor, which need not be positive
        gains = 2.5 * (gains - 0.5)
    dtype, scale, index = (getattr(torch, point.dtypes[symbol]) for symbol in "TSI")
    return {
        "x": x.to(dtype),
        "gate_up": gate_up.to(dtype),
        "down": down.to(dtype),
        "gains": gains.to(scale),
        "ids": ids.to(index),
        "output": torch.full((tokens, hidden), math.nan, dtype=dtype, device=device),
    }
