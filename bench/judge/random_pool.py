"""Random bits from which large tensors are mixed, drawn once per trial and copied to each runner.

See `bench/runner/mixing.py`. The place and mask of a set follow from its case's secret seed; each
command to the runner contains them, as it would contain the bytes.
"""

from __future__ import annotations

import random
import weakref

import numpy as np
import torch
from torch import Tensor

from patcher.bench.judge.blob import Bytes, Layout, Slot
from patcher.bench.judge.cases import Case, Secrets, Values, shapes_tried, tensors_of
from patcher.bench.judge.process import Runner
from patcher.bench.ops.contract import Sweep
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.ops.op import Op
from patcher.bench.runner.mixing import Mixer

PIECE_BYTES = 64 << 20
"""Size of the pieces in which a pool is sent."""

Recipe = list[int]
"""First word, mask, and the byte in which a bit is flipped, or -1."""


class RandomPool:
    """The pool of one trial: as large as the largest mixed tensor, or empty."""

    def __init__(self, op: Op, sweep: Sweep, device: str, draw: Secrets) -> None:
        plans = [tensors_of(op, point) for point in shapes_tried(op, sweep)]
        self.size = max((slot.span_bytes for plan in plans for slot in mixed(plan)), default=0)
        self.bits = torch.empty(0, dtype=torch.uint8, device=device)
        if self.size:
            generator = torch.Generator(device).manual_seed(draw.seed())
            self.bits = torch.randint(
                0, 256, (self.size,), generator=generator, device=device, dtype=torch.uint8
            )
        self._mixer = Mixer()
        self._rooms: list[Bytes] = []

    def room(self, sets: int, set_bytes: int, user: object) -> Bytes:
        """A buffer for the sent bytes, [sets, set_bytes]. It is reused once `user` is gone, since
        new memory costs more than writing to it.
        """
        size = sets * set_bytes
        fitting = [at for at, room in enumerate(self._rooms) if room.nbytes >= size]
        room = self._rooms.pop(fitting[0]) if fitting else np.empty(size, dtype=np.uint8)
        weakref.finalize(user, self._rooms.append, room)
        return room[:size].reshape(sets, set_bytes)

    def recipes(self, case: Case, plan: Layout) -> list[Recipe]:
        """The recipe of each mixed tensor, in order."""
        return [self._recipe(case, slot) for slot in mixed(plan)]

    def _recipe(self, case: Case, slot: Slot) -> Recipe:
        chosen = random.Random(f"{case.seed} {slot.name}")
        at, mask = chosen.randrange(self.size // 8), chosen.getrandbits(64) - (1 << 63)
        if case.changed is None:
            return [at, mask, -1]
        changed = random.Random(f"{case.changed} {slot.name}")
        return [at, mask, changed.randrange(slot.span_bytes)]

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
            piece = self.bits[at : at + PIECE_BYTES].cpu().numpy()
            runner.send(piece)
            runner.command("stock", whole=self.size, at=at, size=len(piece))
        runner.lent = self


def mixed(plan: Layout) -> list[Slot]:
    return [slot for slot in plan.slots if slot.travel == "mixed"]
