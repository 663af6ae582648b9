"""How tensors travel between judge and runner: plain bytes in a shared file, red zones around each.

Each tensor of each set lies in a slot: red zone, data, red zone. The runner hands the whole slot
back, so that the judge, not the candidate's process, sees whether a write strayed. Red zones are
0xff: NaN in every float dtype, so a read that strays shows in the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from bench.records import Record

RED_ZONE = 256
FILL = 0xFF
_ALIGN = 256


class Slot(Record):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of a set to the slot."""
    data_bytes: int

    @property
    def slot_bytes(self) -> int:
        return 2 * RED_ZONE + _round_up(self.data_bytes)


class Layout(Record):
    slots: tuple[Slot, ...]

    @property
    def set_bytes(self) -> int:
        last = self.slots[-1]
        return last.offset + last.slot_bytes


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Slots for (name, dtype, shape) in order."""
    slots, offset = [], 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        slot = Slot(name=name, dtype=dtype, shape=shape, offset=offset, data_bytes=size)
        slots.append(slot)
        offset += slot.slot_bytes
    return Layout(slots=tuple(slots))


def write_set(layout: Layout, block: np.ndarray, values: dict[str, torch.Tensor]) -> None:
    """Fill one set's bytes (uint8, `set_bytes` long) with values between red zones."""
    block[:] = FILL
    for slot in layout.slots:
        data = values[slot.name].contiguous().view(torch.uint8).reshape(-1).numpy()
        begin = slot.offset + RED_ZONE
        block[begin : begin + slot.data_bytes] = data


def read_set(layout: Layout, block: np.ndarray) -> dict[str, torch.Tensor]:
    """The tensors of one set, copied out."""
    values = {}
    for slot in layout.slots:
        begin = slot.offset + RED_ZONE
        data = torch.from_numpy(block[begin : begin + slot.data_bytes].copy())
        values[slot.name] = data.view(getattr(torch, slot.dtype)).reshape(slot.shape)
    return values


def strayed(layout: Layout, block: np.ndarray) -> list[str]:
    """Names of tensors around which a red zone was written."""
    found = []
    for slot in layout.slots:
        whole = block[slot.offset : slot.offset + slot.slot_bytes]
        after = RED_ZONE + slot.data_bytes
        if not ((whole[:RED_ZONE] == FILL).all() and (whole[after:] == FILL).all()):
            found.append(slot.name)
    return found


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
