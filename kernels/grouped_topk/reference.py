"""grouped_topk in plain PyTorch: reference, the choices that are right, and control."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROUNDOFF = 2.0**-24
"""Half of float32's unit in the last place, relative."""
FLUSHED = 1e-37
"""Error from flushing float32's subnormal numbers to zero."""


def reference(
    logits: Tensor, bias: Tensor, settings: Tensor, experts: Tensor, scaling: float, **_: Any
) -> dict[str, Tensor]:
    """The values of `weights` and `experts`, both as float64.

    Args:
        logits: [tokens, n_experts], any float dtype.
        bias: [n_experts], or [0] for none.
        settings: sizes alone: sigmoid, renormalised, groups, top_groups.
        experts: [tokens, top_k], only written, as are the weights.
        scaling: factor of all weights.
    """
    scores = _scores(logits, settings, torch.float64)
    chosen = _chosen(scores, bias, settings, experts.shape[1])
    return {"weights": _weights(scores, chosen, settings, scaling), "experts": chosen.double()}


def derived(
    logits: Tensor, bias: Tensor, settings: Tensor, experts: Tensor, scaling: float, **_: Any
) -> dict[str, Tensor]:
    """`reference`, of the experts that were written where these are right: where values within
    float32's roundings of the float64 ones have them as their choice.
    """
    scores = _scores(logits, settings, torch.float64)
    written = experts.long().clamp(0, logits.shape[1] - 1)
    right = _may_be_chosen(logits, bias, scores, settings, written) & (written == experts).all(1)
    chosen = _chosen(scores, bias, settings, experts.shape[1])
    chosen = torch.where(right.unsqueeze(1), written, chosen)
    return {"weights": _weights(scores, chosen, settings, scaling), "experts": chosen.double()}


def control(
    logits: Tensor, bias: Tensor, settings: Tensor, experts: Tensor, scaling: float, **_: Any
) -> dict[str, Tensor]:
    """`reference` in bfloat16, like a kernel with bfloat16 arithmetic."""
    scores = _scores(logits, settings, torch.bfloat16)
    chosen = _chosen(scores, bias.bfloat16(), settings, experts.shape[1])
    found = _weights(scores, chosen, settings, scaling)
    return {"weights": found.float(), "experts": chosen.to(experts.dtype)}


def _scores(logits: Tensor, settings: Tensor, dtype: torch.dtype) -> Tensor:
    # step by step, so that each intermediate is rounded to dtype
    wide = logits.to(dtype)
    if settings.shape[0]:
        return 1 / (1 + (-wide).exp())
    parts = (wide - wide.amax(1, keepdim=True)).exp()
    return parts / parts.sum(1, keepdim=True)


def _weights(scores: Tensor, chosen: Tensor, settings: Tensor, scaling: float) -> Tensor:
    picked = scores.gather(1, chosen)
    if settings.shape[1]:
        picked = picked / (picked.sum(1, keepdim=True) + 1e-20)
    return picked * scaling


def _chosen(scores: Tensor, bias: Tensor, settings: Tensor, top_k: int) -> Tensor:
    values = scores + bias if bias.numel() else scores
    of_groups = _best(values, bias, settings)[0].sum(2)
    first = torch.argsort(of_groups, dim=1, descending=True, stable=True)
    out = torch.ones_like(of_groups, dtype=torch.bool)
    out.scatter_(1, first[:, : settings.shape[3]], False)
    # what is out comes after all that is kept
    order = torch.argsort(values, dim=1, descending=True, stable=True)
    left = _spread(out, scores).gather(1, order)
    return order.gather(1, torch.argsort(left.int(), dim=1, stable=True))[:, :top_k]


def _best(values: Tensor, bias: Tensor, settings: Tensor) -> tuple[Tensor, Tensor]:
    """The values that make a group's, the largest first, [tokens, groups, 1 or 2], and whose."""
    members = values.unflatten(1, (settings.shape[2], -1))
    best, at = members.topk(min(2, members.shape[2]) if bias.numel() else 1)
    first = torch.arange(settings.shape[2], device=values.device) * members.shape[2]
    return best, at + first.view(-1, 1)


def _spread(of_groups: Tensor, scores: Tensor) -> Tensor:
    """What groups have, for each of their experts."""
    return of_groups.repeat_interleave(scores.shape[1] // of_groups.shape[1], 1)


def _slack(logits: Tensor, values: Tensor, scores: Tensor, settings: Tensor) -> Tensor:
    """How far a float32 value may be from the float64 one, [tokens, n_experts]."""
    if settings.shape[0]:  # by a hyperbolic tangent it is rounded by the size of 1
        slack = 4 * ROUNDOFF * torch.ones_like(scores)
    else:  # a difference of large logits is rounded by its size
        wide = logits.double()
        factor = 16 + 2 * (wide.amax(1, keepdim=True) - wide) + 2 * math.sqrt(logits.shape[1])
        slack = ROUNDOFF * torch.where(scores > 0, factor * scores, 0.0)
    slack = slack + 2 * ROUNDOFF * values.abs() + FLUSHED
    return torch.where(slack.isfinite(), slack, 0.0)


def _may_be_chosen(
    logits: Tensor, bias: Tensor, scores: Tensor, settings: Tensor, chosen: Tensor
) -> Tensor:
    """Of which tokens the experts can be the choice, bool [tokens].

    One comes surely before another if its value is larger whatever is rounded, or if both have one
    logit and one bias, and it is the smaller expert. Groups alike, by the values that make theirs.
    """
    top_k, groups, top_groups = chosen.shape[1], settings.shape[2], settings.shape[3]
    added = bias.double() if bias.numel() else logits.new_zeros(logits.shape[1]).double()
    values = scores + added
    nothing = values.isnan()
    slack = _slack(logits, values, scores, settings)
    values = values.masked_fill(nothing, math.inf)
    low, high = values - slack, values + slack
    best, at = _best(values, bias, settings)
    of_groups = best.sum(2)
    more = torch.where(of_groups.isfinite(), 2 * ROUNDOFF * of_groups.abs(), 0.0)
    least, most = (_best(each, bias, settings)[0].sum(2) for each in (low, high))
    ahead = (least - more).unsqueeze(2) > (most + more).unsqueeze(1)
    parts = logits.gather(1, at.flatten(1)).view(at.shape), added[at]
    same = torch.stack([part.unsqueeze(2) == part.unsqueeze(1) for part in parts]).all(0).all(-1)
    same |= (of_groups.unsqueeze(2) == of_groups.unsqueeze(1)) & of_groups.isinf().unsqueeze(2)
    one = torch.arange(groups, device=logits.device)
    ahead |= same & (one.unsqueeze(1) < one)  # [tokens, the one, the other]
    out = ahead.sum(1) >= top_groups
    # all that is not surely behind may be ahead
    sure = groups - 1 - ahead.sum(2) < top_groups
    group_of = chosen // (logits.shape[1] // groups)
    kept = sure.scatter(1, group_of, True)
    right = ~out.gather(1, group_of).any(1) & (kept.sum(1) <= top_groups)
    taken = torch.zeros_like(nothing).scatter(1, chosen, True)
    right &= taken.sum(1) == top_k  # none of them twice
    others = _spread(kept, scores) & ~taken
    expert = torch.arange(logits.shape[1], device=logits.device)
    for k in range(top_k):
        this = chosen[:, k : k + 1]
        same = (logits == logits.gather(1, this)) & (added == added[this])
        same |= (values == values.gather(1, this)) & values.isinf()
        before = (low > high.gather(1, this)) | (same & (expert < this))
        right &= ~(before & others).any(1) & ~before.gather(1, chosen[:, k + 1 :]).any(1)
    # what is no number stood for an infinity
    mixed = nothing.any(1) & (values.isinf() & ~nothing).any(1)
    return right & ~mixed & ~of_groups.isnan().any(1)
