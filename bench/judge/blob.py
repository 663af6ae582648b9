"""How tensors travel between judge and runner: plain bytes, red zones around each.

Each tensor of each set lies in a slot: red zone, data, red zone. The runner hands the whole slot
back, so that the judge, not the candidate's process, sees whether a write strayed; so do the gaps
between the rows of a padded tensor. Red zones are 0xff: NaN in every float dtype, so a read that
strays shows in the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from bench.records import Record

RED_ZONE = 256
FILL = 0xFF
_ALIGN = 256

Bytes = NDArray[np.uint8]


class Slot(Record):
    """One tensor's place in a set."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int
    """Bytes from the start of a set to the slot."""
    begin: int
    """Bytes from the start of a set to the first element."""
    span_bytes: int
    """From the first element to the end of the last."""
    slot_bytes: int

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor in a set's bytes (uint8, on the CPU)."""
        data = block[self.begin : self.begin + self.span_bytes]
        return data.view(getattr(torch, self.dtype)).as_strided(self.shape, self.strides)


class Layout(Record):
    slots: tuple[Slot, ...]
    set_bytes: int
    """A multiple of 8."""

    @cached_property
    def outside(self) -> NDArray[np.bool_]:
        """Bytes of a set that belong to no tensor: red zones, and gaps between rows."""
        found = np.ones(self.set_bytes, dtype=bool)
        marks = torch.from_numpy(found)
        for slot in self.slots:
            if slot.span_bytes:
                size = getattr(torch, slot.dtype).itemsize
                shape, strides = (*slot.shape, size), (*(s * size for s in slot.strides), 1)
                marks[slot.begin :].as_strided(shape, strides).fill_(False)
        return found


class Wanted(Record):
    """A tensor for which a slot is made."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    padding: int = 0
    """Elements between the end of a row and the start of the next."""
    shift: int = 0
    """Elements by which the first one is off the aligned place."""


def layout(tensors: Sequence[Wanted]) -> Layout:
    """Slots in order."""
    slots, offset = [], 0
    for wanted in tensors:
        size = int(getattr(torch, wanted.dtype).itemsize)
        strides = _strides(wanted.shape, wanted.padding)
        empty = 0 in wanted.shape
        last = sum((n - 1) * stride for n, stride in zip(wanted.shape, strides, strict=True))
        span = 0 if empty else (last + 1) * size
        whole = 2 * RED_ZONE + _round_up(span + wanted.shift * size)
        slots.append(
            Slot(
                name=wanted.name,
                dtype=wanted.dtype,
                shape=wanted.shape,
                strides=strides,
                offset=offset,
                begin=offset + RED_ZONE + wanted.shift * size,
                span_bytes=span,
                slot_bytes=whole,
            )
        )
        offset += whole
    return Layout(slots=tuple(slots), set_bytes=offset)


def write_set(layout: Layout, block: Bytes, values: dict[str, torch.Tensor]) -> None:
    """Fill one set's bytes (`set_bytes` long) with values between red zones; what has no value is
    poison like them.
    """
    block[:] = FILL
    whole = torch.from_numpy(block)
    for slot in layout.slots:
        if slot.span_bytes and slot.name in values:
            slot.view(whole).copy_(values[slot.name])


def read_set(layout: Layout, block: Bytes) -> dict[str, torch.Tensor]:
    """The tensors of one set, contiguous copies."""
    whole = torch.from_numpy(block)
    return {slot.name: slot.view(whole).contiguous().clone() for slot in layout.slots}


def strayed(layout: Layout, blocks: Bytes) -> list[str]:
    """Names of tensors around which, or between whose rows, something was written.

    `blocks`: [sets, set_bytes].
    """
    touched = ((blocks != FILL) & layout.outside).any(axis=0)
    return [
        slot.name
        for slot in layout.slots
        if touched[slot.offset : slot.offset + slot.slot_bytes].any()
    ]


def _strides(shape: tuple[int, ...], padding: int) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
        if axis == len(shape) - 2:
            strides[axis] += padding
    return tuple(strides)


def _round_up(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN
