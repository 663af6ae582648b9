"""lm_head_argmax in plain PyTorch: reference, the choices that are right, and control."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDOFF = 2.0**-24
"""Half of float32's unit in the last place, relative."""
EXACT = 2.0**24
"""Whole numbers up to this are exact in float32."""
FLUSHED = 1e-34
"""Error from flushing float32's subnormal numbers to zero."""


def reference(x: Tensor, weight: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The index of the largest float64 logit, as float64.

    Args:
        x: [tokens, hidden], any float dtype.
        weight: [vocab, hidden], likewise.
        output: [tokens], only written.
    """
    return {"output": _first_largest(x.double() @ weight.double().T).double()}


def derived(x: Tensor, weight: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The index that was written where it is right, else that of the largest float64 logit.

    It is right where logits within `slack` of the float64 ones have it as the first of the largest,
    before or after they are rounded to the dtype of x.
    """
    logits = x.double() @ weight.double().T
    first = _first_largest(logits)
    slack = _slack(x, weight, logits)
    low, high = logits - slack, logits + slack
    chosen = output.long().clamp(0, logits.shape[1] - 1)
    right = _may_be_chosen(low, high, chosen)
    right |= _may_be_chosen(low.to(x.dtype).double(), high.to(x.dtype).double(), chosen)
    # a logit that is NaN is so in any order of the sum
    right &= ~logits.isnan().any(1) & (chosen == output)
    return {"output": torch.where(right, output.long(), first).double()}


def control(x: Tensor, weight: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` of logits in the range of float4, which ends at 6, so that many are equal; a
    judge that accepts it does not discriminate.
    """
    logits = (x.double() @ weight.double().T).clamp(-6.0, 6.0)
    return {"output": _first_largest(logits).to(output.dtype)}


def _first_largest(logits: Tensor) -> Tensor:
    top = logits.amax(1, keepdim=True)  # NaN if a row has one
    best = (logits == top) | (logits.isnan() & top.isnan())
    places = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return places.masked_fill(~best, logits.shape[1]).amin(1)


def _may_be_chosen(low: Tensor, high: Tensor, chosen: Tensor) -> Tensor:
    """Whether values from low to high, [tokens, vocab], can have the largest first at `chosen`: no
    other is surely larger, and no earlier one surely as large."""
    places = torch.arange(low.shape[1], device=low.device)
    before = places < chosen.unsqueeze(1)
    most = high.gather(1, chosen.unsqueeze(1)).squeeze(1)
    # the lowest of all, -infinity, is above nothing
    earlier = (before & (low >= most.unsqueeze(1))).any(1)
    return (most >= low.amax(1)) & ~earlier


def _slack(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    """How far a float32 sum may be from the float64 one, [tokens, vocab].

    Four roundings for each root of the number of terms, relative to the sum and to the root of the
    sum of squared terms, which Hölder's inequality bounds. 0 where all sums are exact.
    """
    left, right = x.double(), weight.double()
    sizes = (left.norm(dim=1, keepdim=True), right.norm(dim=1))
    peaks = (left.abs().amax(1, keepdim=True), right.abs().amax(1))
    spread = torch.minimum(sizes[0] * peaks[1], peaks[0] * sizes[1])
    slack = 4 * ROUNDOFF * math.sqrt(x.shape[1]) * (logits.abs() + spread) + FLUSHED
    whole = (left == left.round()).all(1, keepdim=True) & (right == right.round()).all(1)
    exact = whole & (sizes[0] * sizes[1] < EXACT)
    return torch.where(exact | ~slack.isfinite(), 0.0, slack)
