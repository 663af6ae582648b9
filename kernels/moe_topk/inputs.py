"""Seeded inputs of moe_topk, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "tied", "close", "ends")
"""`normal` is timed; the judge adds generic regimes (zeros, ones, NaN, ...)."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"logits", "scores", "experts"}` on the generator's device in the point's dtypes.

    Outputs hold garbage: integers that look plausible.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, of_scores, of_experts = (getattr(torch, point.dtypes[name]) for name in "TSI")
    tokens, experts, top_k = axes["tokens"], axes["n_experts"], axes["top_k"]
    logits = torch.randn(tokens, experts, generator=generator, device=device)
    match regime:
        case "normal":
            logits = 2.0 * logits
        case "tied":  # few values: most rows have equal logits at the border
            logits = logits.round()
        case "close":  # the choice depends on the last bits of a logit
            logits = 1.0 + logits * 2**-8
        case "ends":  # choices at either end of a row
            logits[:, 0] += 20.0
            logits[:, -1] += 20.0
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    garbage = torch.randint(0, experts, (tokens, top_k), generator=generator, device=device)
    return {
        "logits": logits.to(dtype),
        "scores": torch.zeros(tokens, top_k, dtype=of_scores, device=device),
        "experts": garbage.to(of_experts),
    }
