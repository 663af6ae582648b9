"""Seeded inputs of sample_argmax, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "tied", "close", "negative", "last", "masked")
"""`normal` is timed; the judge adds generic regimes (zeros, ones, NaN, ...)."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"logits", "output"}` on the generator's device in the point's dtypes.

    The output holds garbage: indices that look plausible.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype: torch.dtype = getattr(torch, point.dtypes["T"])
    tokens, vocab = axes["tokens"], axes["vocab"]
    logits = torch.randn(tokens, vocab, generator=generator, device=device)
    match regime:
        case "normal":
            logits = 3.0 * logits
        case "tied":  # few values: every long row has its largest several times
            logits = logits.round().clamp(-1.0, 1.0)
        case "close":  # the choice depends on the last bits of a logit
            logits = 1.0 + logits * 2**-8
        case "negative":  # a maximum that begins at 0 finds nothing
            logits = logits - 100.0
        case "last":  # the largest at the end of a row, where a tail may be left out
            logits[:, -1] = 20.0
        case "masked":  # only a few tokens are allowed, and in the first row none
            few = torch.rand(tokens, vocab, generator=generator, device=device) < 4 / vocab
            few[0] = False
            logits = logits.masked_fill(~few, -math.inf)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    garbage = torch.randint(0, max(vocab, 1 << 20), (tokens,), generator=generator, device=device)
    return {"logits": logits.to(dtype), "output": garbage}
