"""Narrow dtypes by their codes: `decode` gives their numbers in float64, `encode` rounds to them.

Every dtype of at most 8 bits per number uses a table of its codes' values, independent of torch's
arithmetic. Other dtypes pass through unchanged.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from patcher.bench.ops.dtypes import Dtype, dtype_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def as_bytes(value: Tensor) -> Tensor:
    """A narrow tensor's items as uint8, which all of torch supports; another tensor unchanged."""
    import torch

    return value.view(torch.uint8) if dtype_of(value.dtype).narrow else value


def decode(value: Tensor, dtype: Dtype | None = None) -> Tensor:
    """The numbers of a narrow tensor in float64; two per item double the last axis.

    Args:
        value: tensor of a narrow dtype, or its bytes with `dtype`. A tensor of any other dtype is
            returned unchanged.
    """
    dtype = dtype or dtype_of(value.dtype)
    if not dtype.narrow:
        return value
    codes = as_bytes(value)
    if dtype.numbers == 2:
        codes = _stacked(codes)
    numbers = _numbers(dtype, codes.device)
    return numbers.index_select(0, codes.flatten().int()).view(codes.shape)


def encode(values: Tensor, dtype: Dtype) -> Tensor:
    """Round to the nearest numbers of a dtype; ties go to the even code.

    If the dtype has no infinities, larger values become the largest number; without a NaN, so does
    NaN; without a sign, smaller values become the smallest number.

    Raises:
        ValueError: an item holds two numbers, and the last axis is odd.
    """
    import torch

    if not dtype.narrow:
        return values.to(dtype.torch_dtype)
    numbers = _numbers(dtype, values.device)
    values, last = values.double(), _last(dtype)
    grid = numbers[: last + 1]
    middles = (grid[1:] + grid[:-1]) / 2
    magnitude = (values.abs() if dtype.signed else values).nan_to_num(nan=math.inf)
    codes = torch.searchsorted(middles, magnitude.contiguous())
    tie = (magnitude == middles[codes.clamp(max=last - 1)]) & (codes < last) & (codes % 2 == 1)
    codes = codes + tie
    if dtype.infinite:
        half = (grid[-1] - grid[-2]) / 2
        codes = torch.where(magnitude >= grid[-1] + half, last + 1, codes)
    if dtype.signed:
        codes = torch.where(values.signbit(), codes | 1 << (dtype.bits - 1), codes)
    if dtype.nan:
        codes = torch.where(values.isnan(), (1 << dtype.bits - dtype.signed) - 1, codes)
    codes = codes.to(torch.uint8)
    if dtype.numbers == 2:
        if codes.shape[-1] % 2:
            raise ValueError(f"{dtype.name} packs two numbers: {codes.shape[-1]} make no item")
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(dtype.torch_dtype)


def rounded(values: Tensor, dtype: Dtype) -> Tensor:
    """Values (float64) rounded to a dtype; for a narrow one in float64 again."""
    if not dtype.narrow:
        return values.to(dtype.torch_dtype)
    return decode(encode(values, dtype), dtype)


def saturated(values: Tensor, dtype: Dtype) -> Tensor:
    """Values (float64) clipped to a narrow dtype's range if it has no infinities."""
    if dtype.infinite or not dtype.narrow:
        return values
    return values.clamp(-dtype.finite_max if dtype.signed else dtype.smallest, dtype.finite_max)


def nudge(value: Tensor, index: int) -> None:
    """Add 1 to one number of a contiguous tensor, in place. If a narrow dtype rounds that to the
    same number, halve it.

    Args:
        index: flat index of the number.
    """
    dtype = dtype_of(value.dtype)
    if not dtype.narrow:
        value.view(-1)[index] += 1
        return
    items = value.view(-1)
    place = slice(index // dtype.numbers, index // dtype.numbers + 1)
    numbers = decode(items[place])
    which = index % dtype.numbers
    for changed in (numbers[which] + 1, numbers[which] / 2):
        wanted = numbers.clone()
        wanted[which] = changed
        made = encode(wanted, dtype)
        if not decode(made).equal(numbers):
            break
    as_bytes(items)[place] = as_bytes(made)


def _stacked(codes: Tensor) -> Tensor:
    """Bytes [..., n] as halves [..., 2 n]."""
    import torch

    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)


def _last(dtype: Dtype) -> int:
    """The code of the largest finite number."""
    specials = (1 << dtype.mantissa) if dtype.infinite else int(dtype.nan)
    return (1 << dtype.bits - dtype.signed) - 1 - specials


def _numbers(dtype: Dtype, device: torch.device) -> Tensor:
    """The value of each code, float64 [2^bits]."""
    import torch

    return torch.tensor(_codes(dtype), dtype=torch.float64, device=device)


@cache
def _codes(dtype: Dtype) -> tuple[float, ...]:
    return tuple(_number(dtype, code) for code in range(1 << dtype.bits))


def _number(dtype: Dtype, code: int) -> float:
    if not dtype.signed:
        return math.nan if code == 255 else math.ldexp(1.0, code - dtype.bias)
    sign = -1.0 if code >> dtype.bits - 1 else 1.0
    code &= (1 << dtype.bits - 1) - 1
    exponent, fraction = code >> dtype.mantissa, code & (1 << dtype.mantissa) - 1
    if code > _last(dtype):
        return sign * math.inf if dtype.infinite and fraction == 0 else math.nan
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - dtype.bias - dtype.mantissa)
    return sign * math.ldexp(
        (1 << dtype.mantissa) + fraction, exponent - dtype.bias - dtype.mantissa
    )
