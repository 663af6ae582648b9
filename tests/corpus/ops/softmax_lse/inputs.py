"""Seeded inputs of softmax_lse, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "peaked", "shifted", "masked")
"""`normal` is what is timed; generic regimes (zeros, large, NaN, ...) are the judge's."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"logits", "probs", "lse"}` on the generator's device; the outputs are NaN until written.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    dtype, sum_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "S"))
    rows, n = point.axes["rows"], point.axes["n"]
    logits = 2.0 * torch.randn(rows, n, generator=generator, device=device)
    column = torch.randint(0, n, (rows, 1), generator=generator, device=device)
    match regime:
        case "normal":
            pass
        case "peaked":  # one logit a row takes it all, anywhere in the row
            logits = logits.scatter(1, column, 40.0)
        case "shifted":  # exp overflows unless the row's maximum is taken off first
            logits = logits + 200.0 * torch.randn(rows, 1, generator=generator, device=device)
        case "masked":  # as attention masks: all of a row up to one element may be -inf
            kept = torch.arange(n, device=device) <= column
            logits = logits.masked_fill(~kept, -math.inf)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    probs = torch.full((rows, n), math.nan, device=device)
    lse = torch.full((rows,), math.nan, device=device)
    return {"logits": logits.to(dtype), "probs": probs.to(dtype), "lse": lse.to(sum_dtype)}
