"""Where the judge puts tensors in memory: the strides that a contract allows.

A kernel that takes one layout for granted must fail here, since engines differ: vLLM pads rows of
scales, keeps keys and values of a block or of a head side by side, or heads before tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from patcher.bench.ops.contract import TensorSpec
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.ops.op import Op

PADDING, SHIFT = 8, 1
"""Elements of padding between rows, at least, or of misalignment, if the contract allows them."""
_LAYOUTS = {
    "padded": ("rows", "strided"),
    "interleaved": ("strided",),
    "packed": ("strided",),
    "permuted": ("strided",),
}
"""The layouts of tensors that each placement changes.

- `padded`: a gap between rows; of a strided tensor, also between the entries of every other axis.
- `interleaved`: each entry of the first axis is followed by a gap of its own size.
- `packed`: each row is followed by a gap of its own size.
- `permuted`: the two axes before the last one are swapped in memory.
"""


def placements(op: Op) -> list[str]:
    """The placements that the contract allows, besides `plain`."""
    layouts = {tensor.layout for tensor in op.contract.tensors}
    found = [name for name, changed in _LAYOUTS.items() if layouts & set(changed)]
    if any(tensor.alignment < 16 for tensor in op.contract.tensors):
        found.append("shifted")
    return found


def strides_of(
    tensor: TensorSpec, shape: tuple[int, ...], dtype: str, placed: str = "plain"
) -> tuple[int, ...]:
    """The strides of a tensor in a placement, in elements.

    Args:
        tensor: the contract's tensor.
        shape: its shape.
        dtype: name of its dtype.
        placed: a placement.
    """
    axes = list(range(len(shape)))
    if len(axes) < 2 or tensor.layout not in _LAYOUTS.get(placed, ()):
        return contiguous(shape)
    gaps = {}
    if placed == "permuted" and len(axes) > 2:
        axes[-3], axes[-2] = axes[-2], axes[-3]
    elif placed == "padded":
        gaps = {axes[-1]: PADDING}
        if tensor.layout == "strided":
            gaps = dict.fromkeys(axes, PADDING)
    elif placed == "packed":
        gaps = {axes[-1]: shape[-1]}
    elif placed == "interleaved":
        gaps = {axes[1]: math.prod(shape[1:])}
    unit = max(tensor.alignment // DTYPES[dtype].item_bytes, 1)
    return _in_memory(axes, shape, gaps, unit)


def _in_memory(
    order: list[int], shape: tuple[int, ...], gaps: dict[int, int], unit: int
) -> tuple[int, ...]:
    """The strides of axes that lie in memory in this order, the outermost first.

    Args:
        order: the axes.
        shape: their sizes.
        gaps: elements of the gap after all entries of an axis, by axis.
        unit: every stride but that of the innermost axis is rounded up to a multiple of it.
    """
    strides = [1] * len(shape)
    extent = 1
    for axis in reversed(order):
        strides[axis] = extent
        extent = extent * shape[axis] + gaps.get(axis, 0)
        extent += -extent % unit
    return tuple(strides)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def strides_that_matter(shape: Sequence[int], strides: Sequence[int]) -> tuple[Any, ...]:
    """Strides without those of axes with fewer than two entries, which mean nothing."""
    if 0 in shape:
        return ()
    return tuple(s if n > 1 else None for n, s in zip(shape, strides, strict=True))
