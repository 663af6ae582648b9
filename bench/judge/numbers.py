"""The numbers of a tensor: the values of its bits, times its block scales if it has any."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from patcher.bench.errors import UsageError
from patcher.bench.ops.codes import as_bytes, decode
from patcher.bench.ops.contract import Contract, TensorSpec
from patcher.bench.ops.dtypes import dtype_of


def stacked(name: str, sets: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    """A tensor of each set as stored, [sets, ...]; a narrow one's items as uint8."""
    return torch.stack([as_bytes(each[name]) for each in sets]).to(device)


def numbers(
    contract: Contract,
    tensor: TensorSpec,
    sets: Sequence[Mapping[str, Tensor]],
    device: torch.device,
) -> Tensor:
    """The numbers of a tensor of each set, [sets, ...], in its own dtype, or in float64 if that is
    narrow or has block scales.

    Raises:
        UsageError: a block scale does not have one number per block.
    """
    found = _decoded(tensor.name, sets, device)
    for scale in contract.scales_of(tensor.name):
        factor = _decoded(scale.name, sets, device).double()
        found = found.double() * _spread(factor, found.shape[1:], scale)
    return found


def _decoded(name: str, sets: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    return decode(stacked(name, sets, device), dtype_of(sets[0][name].dtype))


def _spread(factor: Tensor, shape: Sequence[int], scale: TensorSpec) -> Tensor:
    """The scale of each number, [sets, *shape]."""
    blocks = [
        1 if size == 0 else math.ceil(n / size) for n, size in zip(shape, scale.block, strict=True)
    ]
    if factor[0].numel() != math.prod(blocks):
        raise UsageError(
            f"{scale.name} has {factor[0].numel()} scales, and {scale.scale_of} "
            f"{list(shape)} in blocks of {list(scale.block)} needs {math.prod(blocks)}",
            "correct `block` or the shape in op.toml",
        )
    found = factor.view(len(factor), *blocks)
    for axis, (n, size) in enumerate(zip(shape, scale.block, strict=True), 1):
        if size > 1:
            found = found.repeat_interleave(size, axis).narrow(axis, 0, n)
        elif size == 0:
            found = found.expand(*found.shape[:axis], n, *found.shape[axis + 1 :])
    return found
