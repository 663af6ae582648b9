"""Is it right? Error against float64, measured by the honest baseline's own error, never by a bare
tolerance.

A candidate may err 1.05 times as much as the honest baseline in the root mean square (and a
sampling margin that shrinks with the number of elements), twice as much at the worst element and
one unit in the last place more (a sum in another order can push one rounding to the other side:
judged without that, an honest kernel failed in one of a hundred judgements), plus what float32 sums
in another order cost. So a bfloat16 op has bfloat16's slack and a float32 op has
float32's; a kernel that computes a whole precision lower fails, and a planted one must
(`control`): with bfloat16 storage and bfloat16 arithmetic it errs 1.2 to 2 times as much as the
honest baseline, with float32 storage 10^4 times. Source of the idea: PyTorch Dynamo's `same()` and
FlashAttention's tests, both relative to the eager kernel's error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_FACTOR = 2.0
P999_FACTOR = 2.0
FLOAT32_ROUNDOFF = 2.0**-24


def rmse_factor(elements: int) -> float:
    """Two honest kernels differ by under 1 % over 20,000 elements and by up to 9 % over 300."""
    return 1.05 + 2.5 / math.sqrt(elements)


@dataclass(frozen=True)
class ErrorOf:
    """Absolute error of one tensor against float64."""

    rmse: float
    p999: float
    largest: float


def error_of(value: Tensor, reference: Tensor, forgiven: Tensor | float = 0.0) -> ErrorOf:
    """Error where both are finite; a non-finite value where the reference is finite counts as
    infinite. In the tail, each element is forgiven that much; in the root mean square nothing.
    """
    difference = (value.double() - reference).abs()
    difference = torch.where(difference.isnan(), math.inf, difference)
    if difference.numel() == 0:
        return ErrorOf(0.0, 0.0, 0.0)
    tail = (difference - forgiven).clamp_min(0.0).flatten()
    tail = torch.where(tail.isnan(), math.inf, tail)
    rank = max(math.ceil(0.999 * tail.numel()), 1)
    p999 = float(tail.kthvalue(rank).values)
    return ErrorOf(float(difference.square().mean().sqrt()), p999, float(tail.max()))


def explain_mismatch(
    value: Tensor, honest: Tensor, reference: Tensor, reduction: int
) -> str | None:
    """None where `value` is as right as the honest baseline, else what is wrong with it."""
    last_place = torch.finfo(value.dtype).eps * reference.abs()
    ours, theirs = error_of(value, reference, last_place), error_of(honest, reference)
    order = FLOAT32_ROUNDOFF * math.sqrt(reduction)
    finite = reference[reference.isfinite()]
    scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    top = float(finite.abs().max()) if finite.numel() else 0.0
    limits = (
        ("rmse", ours.rmse, rmse_factor(reference.numel()) * theirs.rmse + order * scale),
        ("99.9th percentile of the error", ours.p999, P999_FACTOR * theirs.p999 + 4 * order * top),
        ("largest error", ours.largest, MAX_FACTOR * theirs.largest + 4 * order * top),
    )
    for what, got, limit in limits:
        if not got <= limit:
            where = _worst(value, reference)
            return (
                f"{what} {got:.3g}, at most {limit:.3g} allowed "
                f"(honest baseline {theirs.rmse:.3g} rmse); {where}"
            )
    return None


def _worst(value: Tensor, reference: Tensor) -> str:
    difference = (value.double() - reference).abs()
    difference = torch.where(difference.isnan(), math.inf, difference)
    flat = int(difference.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), reference.shape))
    wrong = int((difference > 1e-2 * (1 + reference.abs())).sum())
    return (
        f"worst at {list(index)}: got {float(value.flatten()[flat]):.6g}, "
        f"expected {float(reference.flatten()[flat]):.6g}; "
        f"{wrong} of {reference.numel()} elements off by over 1 %"
    )
