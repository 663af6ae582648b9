"""Problems of one shape as bytes: what is sent of them, and checks of what is returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from patcher.bench.judge import regimes
from patcher.bench.judge.blob import (
    FILL,
    Bytes,
    Layout,
    as_slot,
    equal,
    holds,
    is_poison,
    read_set,
    strayed,
    write_set,
    write_slot,
)
from patcher.bench.judge.cases import (
    Case,
    Expected,
    Values,
    expect,
    make_inputs,
    tensors_of,
    value_problem,
)
from patcher.bench.judge.memory_file import Left
from patcher.bench.judge.process import Runner
from patcher.bench.judge.random_pool import RandomPool, Recipe
from patcher.bench.ops.op import Op
from patcher.bench.runner.mixing import Mixer


@dataclass
class CallSets:
    """One problem per set of buffers."""

    op: Op
    plan: Layout
    cases: list[Case]
    inputs: list[Values]
    recipes: list[list[Recipe]]
    """For each set, the recipe of each mixed tensor."""
    data: Bytes = field(init=False)
    """What comes back as it was sent, [sets, returned_bytes - poisoned_bytes], on the device; the
    poison before it is not kept."""

    @classmethod
    def made(cls, op: Op, cases: Sequence[Case], device: str, stock: RandomPool) -> Self:
        """Cases of one shape, placement and regime, of the same tensors, with their values on the
        device.
        """
        first = cases[0]
        changed = regimes.changed(op, first.regime, first.only)
        plan = tensors_of(op, first.point, first.placed, changed=changed, recorded=first.recorded)
        if lacking := stock.lacks(plan):
            plan = tensors_of(op, first.point, first.placed, changed=changed | lacking)
        inputs = [make_inputs(op, case, device) | stock.values(case, plan) for case in cases]
        recipes = [stock.recipes(case, plan) for case in cases]
        sets = cls(op, plan, list(cases), inputs, recipes)
        sent_back = plan.returned_bytes - plan.poisoned_bytes
        sets.data = packed(op, plan, inputs, stock.room(len(cases), sent_back, sets))
        return sets

    def write(self, rows: Bytes) -> None:
        """Fill what is sent, uint8 of shape [sets, sent_bytes]."""
        begin = self.plan.poisoned_bytes
        rows[:, : self.data.shape[1]].copy_(self.data)
        for row, values in zip(rows, self.inputs, strict=True):
            for slot in self.plan.watched:
                if slot.offset - begin < len(row):
                    write_slot(slot.moved(-begin), row, values[slot.name])

    def send(self, runner: Runner) -> None:
        """CUDA: write all that the runner's next command reads."""
        self.write(runner.gpu_sets.sent(len(self.cases), self.plan.sent_bytes))
        torch.cuda.synchronize()

    def write_whole(self, rows: Bytes, only: slice = slice(None)) -> None:
        """Fill sets, or some, with the poison before what is sent: [sets, set_bytes]."""
        begin = self.plan.poisoned_bytes
        for row, head, values in zip(rows[only], self.data[only], self.inputs[only], strict=True):
            row[:begin].fill_(FILL)
            row[begin : begin + len(head)].copy_(head)
            for slot in self.plan.watched:
                write_slot(slot, row, values[slot.name])

    def fill(self, runner: Runner, only: slice = slice(None)) -> None:
        """On a CPU: write sets, or some, into the buffers of the stopped runner."""
        self.write_whole(runner.sets.rows(self.plan, len(self.cases)), only)

    def told(self) -> dict[str, Any]:
        """Arguments of a command about them, besides the bytes."""
        return {
            "plan": self.plan.model_dump(),
            "scalars": list(self.cases[0].scalars),
            "sets": len(self.cases),
            "recipes": self.recipes,
        }

    def problem(self, left: Left, order: Sequence[int] | None = None) -> tuple[str, str] | None:
        """Errors of the calls of the sets of `order` (by default all): (`guards` or `values`, in
        words).
        """
        called = list(range(len(self.cases)) if order is None else order)
        expected = [expect(self.op, self.cases[i], self.inputs[i]) for i in called]
        return self.problem_with(expected, left, called)

    def problem_with(
        self, expected: Sequence[Expected], left: Left, called: Sequence[int]
    ) -> tuple[str, str] | None:
        """The same, with known correct values."""
        spared = sorted(set(range(len(self.cases))) - set(called))
        if not all(self._untouched(index, left.blocks[index]) for index in spared):
            return "guards", "wrote to buffers of a call that was never made"
        if found := self._guard_problem(left):
            return "guards", found
        names = [tensor.name for tensor in self.op.contract.written]
        values = [read_set(self.plan, left.blocks[index], names) for index in called]
        cases = [self.cases[index] for index in called]
        if found := value_problem(self.op, cases, expected, values):
            return "values", found
        if left.late:
            return "guards", "wrote to its outputs after the call had returned"
        return None

    def _untouched(self, index: int, row: Bytes) -> bool:
        """Whether a set came back as it was before its call."""
        begin = self.plan.poisoned_bytes
        return is_poison(row[:begin]) and equal(row[begin:], self.data[index])

    def _guard_problem(self, left: Left) -> str | None:
        """Writes of calls that the contract forbids."""
        # of all sets at once, since those that were not called are known to be whole
        if stray := strayed(self.plan, left.blocks):
            return f"wrote outside of {', '.join(stray)}"
        begin = self.plan.poisoned_bytes
        for tensor, slot in zip(self.op.contract.tensors, self.plan.slots, strict=True):
            if tensor.access != "read" or slot.travel != "bytes":
                continue
            sent, back = (
                slice(at, at + slot.span_bytes) for at in (slot.begin - begin, slot.begin)
            )
            if not equal(self.data[:, sent], left.blocks[:, back]):
                return f"changed {tensor.name}, which the contract says is only read"
        if left.whole is not None:
            return self._watched_problem(left.whole)
        digests = [self.digests(values, left.key) for values in self.inputs]
        if left.digests != digests:
            return self._told_otherwise(left.digests, digests)
        return None

    def _watched_problem(self, whole: Bytes) -> str | None:
        """Changes of tensors that are only read, and around them, in sets that the judge sees."""
        for slot in self.plan.watched:
            for row, values in zip(whole, self.inputs, strict=True):
                if not holds(slot, row, values[slot.name]):
                    return (
                        f"changed {slot.name}, which the contract says is only read, or around it"
                    )
        return None

    def digests(self, values: Values, key: int) -> list[int]:
        """Expected digests of the watched slots, which must stay unchanged."""
        mixer = Mixer()
        return [mixer.digest(as_slot(slot, values[slot.name]), key) for slot in self.plan.watched]

    def _told_otherwise(self, got: object, right: list[list[int]]) -> str:
        """Check the runner's digests, which may be anything."""
        names = [slot.name for slot in self.plan.watched]
        for mine, theirs in zip(right, got if isinstance(got, list) else [], strict=False):
            said = theirs if isinstance(theirs, list) else []
            for name, a, b in zip(names, mine, said, strict=False):
                if a != b:
                    return f"changed {name}, which the contract says is only read, or around it"
        return f"gave no digest of {', '.join(names)}"

    def bits(self, left: Left) -> int:
        """A digest of what the first set's call left, by the secret seed of its case as the key."""
        return Mixer().digest(left.blocks[0], self.cases[0].seed)

    def add_outputs(self, left: Left, digest: Any) -> None:
        """Add the written values to a digest of everything compared."""
        written = {tensor.name for tensor in self.op.contract.written}
        parts = [slot for slot in self.plan.slots if slot.name in written]
        for row in left.blocks:
            for slot in parts:
                digest.update(row[slot.begin : slot.begin + slot.span_bytes].cpu().numpy())


def packed(op: Op, plan: Layout, sets: Sequence[Values], room: Bytes | None = None) -> Bytes:
    """The part of input sets that is sent and comes back, [sets, returned_bytes - poisoned_bytes],
    with poison in small tensors that are only written.
    """
    begin = plan.poisoned_bytes
    size = plan.returned_bytes - begin
    read = [tensor.name for tensor in op.contract.tensors if tensor.access != "write"]
    device = next(iter(sets[0].values())).device
    data = torch.empty(len(sets), size, dtype=torch.uint8, device=device) if room is None else room
    for row, values in zip(data, sets, strict=True):
        write_set(plan, row, {name: values[name] for name in read}, begin)
    return data
