"""Accuracy: error against float64, relative to the accuracy baseline's own error.

A candidate's root mean square error may be 1.05 times the accuracy baseline's, plus a sampling
margin that shrinks with the number of elements (of those that do not repeat), over the whole tensor
and over each eighth of each axis. At the worst element it may be twice as large and one unit in the
last place more: a sum in another order can round differently, and without that allowance a correct
kernel failed in one of 100 judgements. Float32 sums in another order are allowed for too, by the
size of the result; where large terms cancel, what they round is not in it, so that values summed
and stored in float32 or wider may err by four times as much. So a bfloat16 op has bfloat16's
tolerance and a float32 op has float32's. A kernel of one lower precision fails, and a planted one
must (`control`): with bfloat16 storage and bfloat16 arithmetic its error is 1.2 to 2 times the
accuracy baseline's, with float32 storage 10^4 times. NaN and infinities must be where the
reference, rounded to the output's dtype, or the accuracy baseline has them.

Numbers are compared, not bits: for a narrow dtype the values of its codes, times their block
scales, so that -0 is 0 and all NaN are equal. A dtype without infinities holds its largest number
instead. If it has no NaN, elements where the reference is NaN are not checked.

Source of the idea: PyTorch Dynamo's `same()` and FlashAttention's tests, both relative to the eager
kernel's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patcher.bench.errors import UsageError
from patcher.bench.judge.baseline_errors import further, rmse_factor
from patcher.bench.ops.codes import as_bytes, decode, rounded, saturated
from patcher.bench.ops.contract import Contract, Point, TensorSpec
from patcher.bench.ops.dtypes import Dtype, dtype_of

MAX_FACTOR = 2.0
P999_FACTOR = 2.0
ORDERS_FACTOR = 4.0
"""For values stored in float32 or wider. Where 24 terms cancel, a plain sum in a row erred by 1.7
times what PyTorch's did on a CPU, and by up to 5 over 8 elements, in 400 draws that are not kept;
no lower precision errs by less than 1,000 times."""
FINE = 2.0**-14
"""Largest error, of the largest number, of an accuracy baseline that sums in float32; one in TF32
errs by more."""
FLOAT32_ROUNDOFF = 2.0**-24
FLUSHED = 1e-34
"""Error from flushing float32's subnormals (2^-126) to zero, divided by a root of 1e-5. Libraries
built with fast arithmetic flush them, too."""
NEAR = 2**-5
"""Allowed error, of its size, of a number for which the accuracy baseline has none."""
REGIONS = 8
FEWEST_IN_REGION = 64
"""Elements that dominate a region's error; with fewer, its root mean square is too uncertain."""
FEWEST_IN_TAIL = 8
"""Elements that dominate the whole error; with fewer, as where large numbers cancel, the 99.9th
percentile is uncertain, and the largest error counts."""


@dataclass(frozen=True)
class ErrorOf:
    """Absolute error of one tensor against float64."""

    rmse: float
    p999: float
    largest: float


def error_of(value: Tensor, reference: Tensor, forgiven: Tensor | float = 0.0) -> ErrorOf:
    """Error where both are finite; a non-finite value where the reference is finite counts as
    infinite. In the tail, that much of each element's error is ignored; in the root mean square
    none.
    """
    return _error(_difference(value, reference), forgiven)


def _error(difference: Tensor, forgiven: Tensor | float) -> ErrorOf:
    if difference.numel() == 0:
        return ErrorOf(0.0, 0.0, 0.0)
    tail = (difference - forgiven).clamp_min_(0.0).flatten()
    rank = max(math.ceil(0.999 * tail.numel()), 1)
    worst = tail.topk(tail.numel() - rank + 1).values  # on a GPU 30 times as fast as kthvalue
    return ErrorOf(float(difference.square().mean().sqrt()), float(worst[-1]), float(worst[0]))


def explain_mismatch(
    value: Tensor,
    honest: Tensor,
    reference: Tensor,
    reduction: int,
    exact: bool = False,
    flushed: float = FLUSHED,
    stored: Dtype | None = None,
    scaled: bool = False,
    alike: bool = False,
    rewritten: bool = False,
) -> str | None:
    """None if `value` is as accurate as the accuracy baseline, else what is wrong with it.

    Args:
        value: numbers, as `numbers` gives them; `honest` alike.
        reference: float64.
        flushed: absolute error ignored everywhere; 0 if subnormal numbers must be kept.
        stored: the dtype that held them; None: that of `value`.
        scaled: whether they are products with block scales.
        alike: whether sums are of terms that are alike, so that a plain sum rounds them all to one
            side, and its error grows with their number and not with its root.
        rewritten: whether another formula is as right, and infinities were planted. They cancel in
            one formula and not in another (inf - inf): a NaN of the reference may be anything, and
            an infinity may be NaN.
    """
    if value.numel() == 0:
        return None
    stored = stored or dtype_of(value.dtype)
    if stored.exact:
        wrong = value != reference.to(value.dtype)
        return _said(value, reference, wrong, "not exactly right") if wrong.any() else None
    if rewritten:
        cancelled = reference.isnan() | (reference.isinf() & value.isnan())
        reference = torch.where(cancelled, value.double(), reference)
    elif stored.narrow and not stored.nan:
        reference = torch.where(reference.isnan(), value.double(), reference)
    if not scaled:
        reference = saturated(reference, stored)
    nearest = reference if scaled else rounded(reference, stored)
    if exact:
        wrong = value != nearest
        return _said(value, reference, wrong, "not exactly right") if wrong.any() else None
    spacing = stored.smallest if stored.narrow and not scaled else 0.0  # of subnormals, flushed
    ordinary = nearest.isfinite() & honest.isfinite()
    if not ordinary.all():
        near = max(NEAR, stored.eps) * _size(reference, nearest, honest) + max(FLUSHED, spacing)
        if problem := _special(value, honest, reference, nearest, ordinary, near):
            return problem
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        value, honest = torch.where(ordinary, value, zero), torch.where(ordinary, honest, zero)
        reference = torch.where(ordinary, reference, zero.double())
    got, allowed = (_difference(each, reference, stored) for each in (value, honest))
    last_place = (stored.eps * reference.abs()).clamp_min(spacing) + flushed
    ours, theirs = _error(got, last_place), _error(allowed, 0.0)

    def signed() -> Tensor:
        return honest.double() - reference

    order = FLOAT32_ROUNDOFF * max(math.sqrt(reduction), reduction / 8 if alike else 0.0)
    squares = reference.square()
    scale, top = float(squares.mean().sqrt()), float(squares.max().sqrt())
    tail = max(4 * order, FLOAT32_ROUNDOFF * reduction) * top  # worst-case error of a plain sum
    fine = stored.eps <= 2 * FLOAT32_ROUNDOFF and theirs.largest <= FINE * top
    orders = ORDERS_FACTOR if fine else 1.0
    rmse = orders * rmse_factor(reference.numel()) * theirs.rmse + 4 * order * scale + flushed
    if ours.rmse > rmse:
        rmse += orders * further(reference.numel(), signed()) * theirs.rmse
    largest = orders * MAX_FACTOR * theirs.largest + tail
    errors = allowed.square()
    carried = _carried(float(errors.sum()), float(errors.square().sum()))
    p999 = orders * P999_FACTOR * theirs.p999 + tail if carried >= FEWEST_IN_TAIL else largest
    limits = (
        ("rmse", ours.rmse, rmse),
        ("99.9th percentile of the error", ours.p999, p999),
        ("largest error", ours.largest, largest),
    )
    for what, found, limit in limits:
        if not found <= limit:
            where = _worst(value, reference)
            return (
                f"{what} {found:.3g}, at most {limit:.3g} allowed "
                f"(honest baseline {theirs.rmse:.3g} rmse); {where}"
            )
    return _by_region(got.square_(), errors, squares, signed, order, flushed, orders)


def _carried(squares: float, fourth: float) -> float:
    """How many elements dominate an error, by the sums of its squares and of their squares."""
    return squares * squares / fourth if fourth else 0.0


def explain_touched(value: Tensor, before: Tensor, kept: Tensor) -> str | None:
    """None if every element of `kept` still has its bits, else which one changed."""
    bits = (value.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))
    same = (bits[0] == bits[1]).view(*value.shape, -1).all(-1)
    wrong = kept & ~same
    return (
        _said(value, before, wrong, "changed elements that must stay unchanged")
        if wrong.any()
        else None
    )


def _by_region(
    got: Tensor,
    allowed: Tensor,
    squares: Tensor,
    signed: Callable[[], Tensor],
    order: float,
    flushed: float,
    orders: float,
) -> str | None:
    """Squared errors and values, in each eighth of each axis; `signed` gives those of `allowed`."""
    for axis, size in enumerate(got.shape):
        if size == 1:
            continue
        others = [other for other in range(got.dim()) if other != axis]
        sums = [each.sum(others) if others else each for each in (got, allowed, squares)]
        sums.append(allowed.square().sum(others) if others else allowed.square())
        step = math.ceil(size / REGIONS)
        chunks = zip(*(torch.split(each, step) for each in sums), strict=True)
        for index, (mine, total, values, fourth) in enumerate(chunks):
            error, power = float(total.sum()), float(fourth.sum())
            carried = _carried(error, power)
            if carried < FEWEST_IN_REGION:
                continue
            count = got.numel() // size * len(mine)
            limit = orders * rmse_factor(carried) * math.sqrt(error / count)
            limit += 4 * order * math.sqrt(float(values.sum()) / count) + flushed
            rmse, begin = math.sqrt(float(mine.sum()) / count), index * step
            if rmse > limit:
                there = signed().narrow(axis, begin, len(mine))
                limit += orders * further(carried, there) * math.sqrt(error / count)
            if not rmse <= limit:
                where = f"[{begin}:{begin + len(mine)}] of axis {axis}"
                return f"rmse {rmse:.3g} in {where}, at most {limit:.3g} allowed there"
    return None


def _special(
    value: Tensor,
    honest: Tensor,
    reference: Tensor,
    nearest: Tensor,
    ordinary: Tensor,
    near: Tensor,
) -> str | None:
    """NaN and infinities must be where the reference, rounded to the dtype (`nearest`), or the
    accuracy baseline has them; `near` is the allowed error of a number, also of one that is finite
    where a little more would have been rounded to an infinity. Where that baseline alone has a
    number, so may a candidate.
    """
    close = reference.isfinite() & ((value.double() - reference).abs() <= near)
    same = ~nearest.isfinite() & (value == honest)
    fits = _alike(value, nearest) | _alike(value, honest) | close | same
    wrong = ~ordinary & ~fits
    return _said(value, reference, wrong, "non-finite values differ") if wrong.any() else None


def _size(reference: Tensor, nearest: Tensor, honest: Tensor) -> Tensor:
    """The number's; where only the accuracy baseline has none, at least the root mean square of all
    such numbers, as a sum that cancels errs by the size of its terms."""
    alone, size = nearest.isfinite() & ~honest.isfinite(), reference.abs()
    usual = size[alone].square().mean().sqrt() if alone.any() else 0.0
    return torch.where(alone, size.clamp_min(float(usual)), size)


def _alike(a: Tensor, b: Tensor) -> Tensor:
    return (a.isnan() & b.isnan()) | (a.isinf() & (a == b))


def _difference(value: Tensor, reference: Tensor, stored: Dtype | None = None) -> Tensor:
    """The error; of an infinity beside a reference at the end of the dtype's range, to the least
    number that is rounded to one."""
    difference = (value.double() - reference).abs()
    if stored is not None and stored.infinite and value.isinf().any():
        least = stored.finite_max * (1 + stored.eps / 4)
        size = reference.abs()
        end = ((1 - NEAR) * least <= size) & (size <= least) & (value.sign() == reference.sign())
        difference = torch.where(end & value.isinf(), least - size, difference)
    return torch.where(difference.isnan(), math.inf, difference)


def _worst(value: Tensor, reference: Tensor) -> str:
    difference = _difference(value, reference)
    flat = int(difference.argmax())
    wrong = int((difference > 1e-2 * (1 + reference.abs())).sum())
    return (
        f"worst at {_index(flat, reference)}: got {float(value.flatten()[flat]):.6g}, "
        f"expected {float(reference.flatten()[flat]):.6g}; "
        f"{wrong} of {reference.numel()} elements off by over 1 %"
    )


def _said(value: Tensor, reference: Tensor, wrong: Tensor, what: str) -> str:
    flat = int(wrong.flatten().int().argmax())
    return (
        f"{what} at {int(wrong.sum())} of {wrong.numel()} elements; first at "
        f"{_index(flat, reference)}: got {float(value.flatten()[flat]):.6g}, "
        f"expected {float(reference.flatten()[flat]):.6g}"
    )


def _index(flat: int, reference: Tensor) -> list[int]:
    # torch.unravel_index imports sympy, which takes seconds
    return [int(i) for i in np.unravel_index(flat, tuple(reference.shape))]


def stacked(name: str, sets: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    """A tensor of each set as stored, [sets, ...]; a narrow one's items as uint8."""
    return torch.stack([as_bytes(each[name]).to(device) for each in sets])


def numbers(
    contract: Contract,
    tensor: TensorSpec,
    sets: Sequence[Mapping[str, Tensor]],
    device: torch.device,
    point: Point,
) -> Tensor:
    """The numbers of a tensor of each set, [sets, ...], in its own dtype, or in float64 if that is
    narrow or has block scales.

    Raises:
        UsageError: a block scale does not have one number per block.
    """
    found = _decoded(tensor.name, sets, device)
    for scale in contract.scales_of(tensor.name):
        factor = _decoded(scale.name, sets, device).double()
        found = found.double() * _spread(
            factor, found.shape[1:], scale, contract.block(scale, point)
        )
    return found


def _decoded(name: str, sets: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    return decode(stacked(name, sets, device), dtype_of(sets[0][name].dtype))


def _spread(
    factor: Tensor, shape: Sequence[int], scale: TensorSpec, block: Sequence[int]
) -> Tensor:
    """The scale of each number, [sets, *shape]."""
    blocks = [1 if size == 0 else math.ceil(n / size) for n, size in zip(shape, block, strict=True)]
    if factor[0].numel() != math.prod(blocks):
        raise UsageError(
            f"{scale.name} has {factor[0].numel()} scales, and {scale.scale_of} "
            f"{list(shape)} in blocks of {list(block)} needs {math.prod(blocks)}",
            "correct `block` or the shape in op.toml",
        )
    found = factor.view(len(factor), *blocks)
    for axis, (n, size) in enumerate(zip(shape, block, strict=True), 1):
        if size > 1:
            found = found.repeat_interleave(size, axis).narrow(axis, 0, n)
        elif size == 0:
            found = found.expand(*found.shape[:axis], n, *found.shape[axis + 1 :])
    return found
