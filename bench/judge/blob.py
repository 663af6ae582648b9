"""The format of tensors between judge and runner: plain bytes, with red zones around each.

Each tensor of each set has a slot: red zone, data, red zone. The runner returns the whole slot, so
that the judge, not the candidate's process, detects stray writes, also in the gaps between the
elements of a tensor that is not contiguous. Red zones are 0xff: NaN in every float dtype, so stray
reads show in the values. In a dtype without a NaN (`float4_e2m1fn_x2`, integers) they are some
number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from patcher.bench.judge.placement import contiguous
from patcher.bench.ops.codes import as_bytes
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.records import Record

RED_ZONE = 256
FILL = 0xFF
_ALIGN = 256

Bytes = torch.Tensor
"""uint8: of the judge's own on the device that is judged, or of what it shares with a runner."""
Travel = Literal["poisoned", "bytes", "checked", "mixed"]
"""`poisoned`: filled with poison where the call runs, and returned; `bytes`: sent and returned;
`checked`: sent, and a digest returned; `mixed`: sent as a recipe, and a digest returned. The slots
of a set are in this order."""
_TRAVELS: tuple[Travel, ...] = ("poisoned", "bytes", "checked", "mixed")
RETURNED = _TRAVELS[:2]
_POISON = -1
"""Eight bytes of poison as int64."""


class Slot(Record):
    """One tensor's position in a set."""

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
    """Bytes from the first element to the end of the last."""
    slot_bytes: int
    travel: Travel = "bytes"
    constant: bool = False
    """Shape of the contract's tensor."""

    def moved(self, by: int) -> Slot:
        """The same slot so many bytes further."""
        return self.model_copy(update={"offset": self.offset + by, "begin": self.begin + by})

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor in a set's bytes, uint8."""
        data = block[self.begin : self.begin + self.span_bytes]
        return data.view(DTYPES[self.dtype].torch_dtype).as_strided(self.shape, self.strides)


class Layout(Record):
    """Slots in the contract's order. The first bytes of a set are returned. Of these the first are
    poison, and what is sent begins after them; sizes are multiples of 8.
    """

    slots: tuple[Slot, ...]
    set_bytes: int
    sent_bytes: int
    returned_bytes: int
    poisoned_bytes: int = 0

    @property
    def watched(self) -> list[Slot]:
        """Slots of which a digest is returned."""
        return [slot for slot in self.slots if slot.travel not in RETURNED]

    @property
    def carried_bytes(self) -> int:
        """The most that goes one way in one command."""
        return max(self.sent_bytes, self.returned_bytes)


class Wanted(Record):
    """A tensor that needs a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None: contiguous."""
    shift: int = 0
    """Elements by which the first one is misaligned."""
    travel: Travel = "bytes"
    constant: bool = False


def layout(tensors: Sequence[Wanted]) -> Layout:
    """Make a slot for each tensor."""
    slots, offset = {}, 0
    ends = dict.fromkeys(_TRAVELS, 0)
    for wanted in sorted(tensors, key=lambda each: _TRAVELS.index(each.travel)):
        size = DTYPES[wanted.dtype].item_bytes
        strides = contiguous(wanted.shape) if wanted.strides is None else wanted.strides
        empty = 0 in wanted.shape
        last = sum((n - 1) * stride for n, stride in zip(wanted.shape, strides, strict=True))
        span = 0 if empty else (last + 1) * size
        whole = 2 * RED_ZONE + _round_up(span + wanted.shift * size)
        slots[wanted.name] = Slot(
            name=wanted.name,
            dtype=wanted.dtype,
            shape=wanted.shape,
            strides=strides,
            offset=offset,
            begin=offset + RED_ZONE + wanted.shift * size,
            span_bytes=span,
            slot_bytes=whole,
            travel=wanted.travel,
            constant=wanted.constant,
        )
        offset += whole
        for travel in _TRAVELS[_TRAVELS.index(wanted.travel) :]:
            ends[travel] = offset
    return Layout(
        slots=tuple(slots[wanted.name] for wanted in tensors),
        set_bytes=offset,
        sent_bytes=ends["checked"] - ends["poisoned"],
        returned_bytes=ends["bytes"],
        poisoned_bytes=ends["poisoned"],
    )


def write_set(
    layout: Layout, block: Bytes, values: Mapping[str, torch.Tensor], begin: int = 0
) -> None:
    """Fill one set from a byte on, as far as the block reaches, with values between red zones. A
    tensor without a value is poisoned like them.
    """
    for slot in layout.slots:
        if begin <= slot.offset < begin + len(block):
            write_slot(slot.moved(-begin), block, values.get(slot.name))


def write_slot(slot: Slot, block: Bytes, value: torch.Tensor | None) -> None:
    """Fill the slot of one tensor in a set's bytes. What the value does not overwrite is poisoned,
    also between elements.
    """
    end, held = slot.begin + slot.span_bytes, slot.span_bytes
    if value is None or _item_bytes(slot) < held:
        held = 0
    block[slot.offset : end - held].fill_(FILL)
    block[end : slot.offset + slot.slot_bytes].fill_(FILL)
    if value is not None and slot.span_bytes:
        as_bytes(slot.view(block)).copy_(as_bytes(value))


def holds(slot: Slot, block: Bytes, value: torch.Tensor) -> bool:
    """Whether the slot of a contiguous tensor in a set's bytes is as `write_slot` left it."""
    data = block[slot.begin : slot.begin + slot.span_bytes]
    if _touched(slot, block[None]):
        return False
    return equal(data, value.reshape(-1).view(torch.uint8))


def equal(one: Bytes, other: Bytes) -> bool:
    """Whether bytes are equal; NumPy tells several times sooner on a CPU."""
    if one.device.type == "cpu":
        return np.array_equal(one.numpy(), other.numpy())
    return torch.equal(one, other)


def as_slot(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as the bytes of its slot with the red zones, on its device."""
    block = torch.full((slot.slot_bytes,), FILL, dtype=torch.uint8, device=value.device)
    at = slot.begin - slot.offset
    block[at : at + slot.span_bytes] = value.reshape(-1).view(torch.uint8)
    return block


def read_set(layout: Layout, block: Bytes, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """These tensors from the returned bytes of one set. A contiguous one is no copy: a large one
    would take longer to copy than to check.
    """
    wanted = set(names)
    return {
        slot.name: as_bytes(slot.view(block)).contiguous().view(DTYPES[slot.dtype].torch_dtype)
        for slot in layout.slots
        if slot.name in wanted
    }


def is_poison(block: Bytes) -> bool:
    """Whether whole slots hold nothing but poison."""
    return bool((block.view(torch.int64) == _POISON).all())


def strayed(layout: Layout, blocks: Bytes) -> list[str]:
    """Names of tensors with writes around or between their elements.

    Args:
        blocks: bytes of shape [sets, returned_bytes].
    """
    slots = [slot for slot in layout.slots if slot.travel in RETURNED]
    if not slots:
        return []
    found = torch.stack([_touched(slot, blocks) for slot in slots]).tolist()  # one wait for a GPU
    return [slot.name for slot, touched in zip(slots, found, strict=True) if touched]


def _touched(slot: Slot, blocks: Bytes) -> torch.Tensor:
    """Whether bytes of a slot outside of elements changed, in red zones or in gaps between
    elements: a bool on the device of the bytes."""
    end = slot.begin + slot.span_bytes
    before = blocks[:, slot.offset : slot.begin]
    after = blocks[:, end : slot.offset + slot.slot_bytes]
    found = (before != FILL).any() | (after != FILL).any()
    size = DTYPES[slot.dtype].item_bytes
    if _item_bytes(slot) < slot.span_bytes:
        gaps = torch.ones(slot.span_bytes, dtype=torch.bool, device=blocks.device)
        shape, strides = (*slot.shape, size), (*(s * size for s in slot.strides), 1)
        gaps.as_strided(shape, strides).fill_(False)
        found |= ((blocks[:, slot.begin : end] != FILL) & gaps).any()
    return found


def _item_bytes(slot: Slot) -> int:
    """Bytes of all elements, without those between them."""
    return math.prod(slot.shape) * DTYPES[slot.dtype].item_bytes


def _round_up(size: int) -> int:
    return math.ceil(size / _ALIGN) * _ALIGN
