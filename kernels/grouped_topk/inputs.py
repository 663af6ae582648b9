"""Seeded inputs of grouped_topk, one regime at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "tied", "close", "ends", "spread", "unfair", "below", "gone")
"""`normal` is timed; the judge adds generic regimes (zeros, ones, NaN, ...)."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, of_bias, of_weights, of_experts = (getattr(torch, point.dtypes[name]) for name in "TBFI")
    tokens, experts, top_k = axes["tokens"], axes["n_experts"], axes["top_k"]
    size = experts // axes["groups"]
    logits = torch.randn(tokens, experts, generator=generator, device=device)
    bias = 0.1 * torch.randn(axes["biased"] * experts, generator=generator, device=device)
    match regime:
        case "normal":
            logits = 2.0 * logits
        case "tied":  # few values: most rows have equal ones at the border, of groups too
            logits, bias = logits.round(), (bias * 10).round() / 4
        case "close":  # the choice depends on the last bits of a logit
            logits = 1.0 + logits * 2**-8
        case "ends":  # choices at either end of a row
            logits[:, 0] += 20.0
            logits[:, -1] += 20.0
        case "spread":  # each group has one of the best experts, so that groups decide
            logits[:, ::size] += 4.0
        case "unfair":  # the bias alone decides, by far
            bias = bias * 100
        case "below":  # small scores, and values below those that a mask might have
            logits, bias = logits - 16.0, bias - 2.0
        case "gone":  # scores of a sigmoid vanish, so that nothing is divided by nothing
            logits = logits - 1000.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")

    def garbage(*shape: int) -> Tensor:
        whole = torch.randint(0, experts, shape, generator=generator, device=device)
        return whole.to(of_experts)

    sizes = (axes[name] for name in ("sigmoid", "renormalised", "groups", "top_groups"))
    return {
        "logits": logits.to(dtype),
        "bias": bias.to(of_bias),
        "settings": garbage(*sizes),
        "weights": torch.zeros(tokens, top_k, dtype=of_weights, device=device),
        "experts": garbage(tokens, top_k),
    }
