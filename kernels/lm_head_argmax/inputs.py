"""Seeded inputs of lm_head_argmax, one regime at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "tied", "close", "negative", "ends", "spikes")
"""`normal` is timed; the judge adds generic regimes (zeros, ones, NaN, ...)."""
SPREAD = 6.0
"""Standard deviation of the normal logits."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"x", "weight", "output"}` on the generator's device in the point's dtypes.

    The output holds garbage: indices that look plausible.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype: torch.dtype = getattr(torch, point.dtypes["T"])
    tokens, hidden, vocab = axes["tokens"], axes["hidden"], axes["vocab"]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, weight = drawn(tokens, hidden), drawn(vocab, hidden).mul_(SPREAD / math.sqrt(hidden))
    match regime:
        case "normal":
            pass
        case "tied":  # every row of the vocabulary twice, in whole numbers: sums are exact
            few = torch.rand(tokens, hidden, generator=generator, device=device) < 12 / hidden
            x = x.round().clamp(-2.0, 2.0) * few
            weight = weight.sign()
            half = vocab // 2
            order = torch.rand(half, generator=generator, device=device).argsort()
            weight[vocab - half :] = weight[:half][order]
        case "close":  # the largest logits differ by less than a unit of T's last place
            common = drawn(hidden)
            near = max(2 * torch.finfo(dtype).eps, 2.0**-10)
            x = common + 0.3 * x
            weight = common / math.sqrt(hidden) + weight * (near * math.sqrt(hidden) / SPREAD)
        case "negative":  # a maximum that begins at 0 finds nothing
            x, weight = x.abs(), -weight.abs()
        case "ends":  # the first or the last row, where a tail may be left out
            common = drawn(hidden)
            sign = 1.0 - 2.0 * (torch.arange(tokens, device=device) % 2).unsqueeze(1)
            x = sign * common + 0.3 * x
            weight[0] = common * (2 * SPREAD / math.sqrt(hidden))
            weight[-1] = -weight[0]
        case "spikes":  # one element per row dominates the sum
            column = torch.randint(0, hidden, (tokens, 1), generator=generator, device=device)
            x = (x * 0.05).scatter(1, column, 60.0)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    garbage = torch.randint(0, max(vocab, 1 << 20), (tokens,), generator=generator, device=device)
    return {"x": x.to(dtype), "weight": weight.to(dtype), "output": garbage}
