"""The pool from which large tensors are mixed, drawn once per trial and copied to each runner.

See `bench/runner/mixing.py`. The place and mask of a set follow from its case's secret seed; each
command to the runner contains them, as it would contain the bytes.
"""

from __future__ import annotations

import math
import random
import weakref

import torch
from torch import Tensor

from patcher.bench.judge import regimes
from patcher.bench.judge.blob import Bytes, Layout, Slot
from patcher.bench.judge.cases import Case, Secrets, Values, shapes_tried, tensors_of
from patcher.bench.judge.process import Runner
from patcher.bench.ops.contract import Point, Sweep
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.ops.op import Op
from patcher.bench.runner.mixing import Mixer

PIECE_BYTES = 64 << 20
"""Size of the pieces in which a pool is sent."""

ANY = "bits"
"""The part of a pool that all tensors of arbitrary bits share."""

Recipe = list[int]
"""What `Mixer.mix` takes."""


class RandomPool:
    """The pool of one trial: random bits as many as the largest tensor of bits has, then the values
    of weights that are mixed, by dtype and shape, as their op draws them; or empty.
    """

    def __init__(self, op: Op, sweep: Sweep, device: str, draw: Secrets) -> None:
        self._anything = {each.name for each in op.contract.tensors if each.values == "bits"}
        parts: dict[str, tuple[Slot, Point]] = {}
        for point in shapes_tried(op, sweep):
            for slot in mixed(tensors_of(op, point)):
                part = self._part(slot)
                if part not in parts or slot.span_bytes > parts[part][0].span_bytes:
                    parts[part] = slot, point
        self._parts: dict[str, tuple[int, int]] = {}
        pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
        for part, (slot, point) in parts.items():
            self._parts[part] = sum(map(len, pieces)), slot.span_bytes
            if part == ANY:
                pieces.append(_bits(slot.span_bytes, draw.seed(), device))
            else:
                drawn = regimes.make(op, point, draw.seed(), "normal", device)[slot.name]
                pieces.append(drawn.contiguous().view(-1).view(torch.uint8))
        self.bits = pieces[-1] if len(pieces) == 2 else torch.cat(pieces)
        self.size = len(self.bits)
        self._mixer = Mixer()
        self._rooms: list[Bytes] = []

    def _part(self, slot: Slot) -> str:
        return ANY if slot.name in self._anything else f"{slot.name} {slot.dtype} {slot.shape}"

    def lacks(self, plan: Layout) -> set[str]:
        """The mixed tensors that have no part: weights have one by shape, since an op may scale
        them by a size, and shapes that are drawn anew have none.
        """
        return {slot.name for slot in mixed(plan) if self._part(slot) not in self._parts}

    def room(self, sets: int, set_bytes: int, user: object) -> Bytes:
        """A buffer on the device for the bytes that come back, [sets, set_bytes]. It is reused once
        `user` is gone, since new memory costs more than writing to it.
        """
        size = sets * set_bytes
        fitting = [at for at, room in enumerate(self._rooms) if room.nbytes >= size]
        room = self._rooms.pop(fitting[0]) if fitting else self.bits.new_empty(size)
        weakref.finalize(user, self._rooms.append, room)
        return room[:size].reshape(sets, set_bytes)

    def recipes(self, case: Case, plan: Layout) -> list[Recipe]:
        """The recipe of each mixed tensor, in order."""
        return [self._recipe(case, slot) for slot in mixed(plan)]

    def _recipe(self, case: Case, slot: Slot) -> Recipe:
        begin, size = self._parts[self._part(slot)]
        chosen = random.Random(f"{case.seed} {slot.name}")
        at, mask = chosen.randrange(size // 8), chosen.getrandbits(64)
        dtype = DTYPES[slot.dtype]
        mantissa = 0 if slot.name in self._anything else dtype.wide_mantissa
        if mantissa:  # whole rows, so that what an op draws by column stays there
            row = max(slot.shape[-1] * dtype.item_bytes // 8, 1)
            at -= at % row
            lanes = range(0, 64, dtype.bits)
            mask &= sum(((1 << mantissa) - 1) << lane for lane in lanes)
        signed = mask - (1 << 64) if mask >> 63 else mask
        if case.changed is None:
            return [at, signed, 0, 0, begin, size]
        changed = random.Random(f"{case.changed} {slot.name}")
        if not mantissa:
            return [at, signed, changed.randrange(slot.span_bytes), 1, begin, size]
        item = changed.randrange(slot.span_bytes // dtype.item_bytes)
        top = (item + 1) * dtype.item_bytes - 1
        now = int(self.bits[begin + (8 * at + top) % size])
        return [at, signed, top, _enlarging(now, dtype.torch_dtype), begin, size]

    def values(self, case: Case, plan: Layout) -> Values:
        """The mixed tensors of a case, as the runner computes them."""
        found: dict[str, Tensor] = {}
        for slot in mixed(plan):
            value = torch.empty(slot.span_bytes, dtype=torch.uint8, device=self.bits.device)
            self._mixer.mix(value, self.bits, self._recipe(case, slot))
            found[slot.name] = value.view(DTYPES[slot.dtype].torch_dtype).view(slot.shape)
        return found

    def lend(self, runner: Runner) -> None:
        """CUDA: send the pool in pieces to a runner that does not have it yet.

        Raises:
            RunnerFailure: that fails there.
        """
        if not self.size or runner.lent is self:
            return
        for at in range(0, self.size, PIECE_BYTES):
            piece = self.bits[at : at + PIECE_BYTES]
            runner.gpu_sets.sent(1, len(piece))[0].copy_(piece)
            torch.cuda.synchronize()
            runner.command("stock", whole=self.size, at=at, size=len(piece))
        runner.lent = self


def _enlarging(byte: int, dtype: torch.dtype) -> int:
    """What to xor a number's highest byte with, so that its size is about 1, or 16 if it was 1.

    A change by a part of a weight would be lost in a long sum that may have bfloat16's error.
    """
    values = torch.tensor([math.inf, 1.0, 16.0], dtype=dtype).view(torch.uint8).view(3, -1)[:, -1]
    exponent, one, more = (int(each) for each in values)
    return (byte ^ one) & exponent or (byte ^ more) & exponent


def _bits(size: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator, device=device, dtype=torch.uint8)


def mixed(plan: Layout) -> list[Slot]:
    return [slot for slot in plan.slots if slot.travel == "mixed"]
