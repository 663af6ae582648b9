"""One side of a timed comparison: a runner, its buffers, and one block of calls after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from bench.contract import Point
from bench.errors import MissingError
from bench.judge import cases as cases_
from bench.judge.blob import Bytes, Layout
from bench.judge.cases import Case, Secrets, Values
from bench.judge.clockcheck import Block
from bench.judge.process import Runner
from bench.judge.zygote import RunnerFailure
from bench.op import Op

SETS = {"cpu": 16, "cuda": 32}
"""Buffer sets of a block."""
MAX_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 16 << 20}
FEWEST_SETS = 4


class Found(Exception):
    """Something wrong in timed calls: (check, detail)."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(detail)
        self.check, self.detail = check, detail


@dataclass
class Arm:
    """One side of the comparison, at one point."""

    op: Op
    device: str
    runner: Runner
    checked: bool
    """Whether its outputs are: the candidate's."""
    accused: bool = True
    """Whether its failures are what is asked for, or a fault of this machine."""
    plan: Layout = field(init=False)

    def prepare(self, point: Point, sets: int, draw: Secrets, timeout_s: float) -> None:
        """First calls at a shape: what is compiled late is compiled; on CUDA, captured."""
        self.plan, self.sets = cases_.tensors_of(self.op, point), sets
        self.scalars = [scalar.value for scalar in self.op.contract.scalars]
        batch = Batch.draw(self, point, draw)
        with self._answering():
            self.runner.send(batch.data)
            self.runner.command("call", timeout_s, **self._arguments(), order=[0, 1])
            if self.device == "cuda":
                self.runner.command("capture", timeout_s, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {"plan": self.plan.model_dump(), "scalars": self.scalars, "sets": self.sets}

    def block(
        self, data: Bytes, order: list[int], mode: str = "whole"
    ) -> tuple[Block, Bytes | None]:
        """One timed block, and what it left behind."""
        with self._answering():
            return self._block(data, order, mode)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """What the baseline does wrong is not the candidate's."""
        try:
            yield
        except RunnerFailure as failure:
            if self.accused:
                raise
            raise MissingError(
                f"the baseline fails here while it is timed: {failure.message}",
                "name another one with --baseline, or see `patcher doctor`",
            ) from failure

    def _block(self, data: Bytes, order: list[int], mode: str) -> tuple[Block, Bytes | None]:
        self.runner.send(data)
        if self.device == "cpu" or mode == "eager":
            self.runner.command("ready", **self._arguments(), order=order)
            reply = self.runner.command("go")
        else:
            kept = self.runner.command("compose", mode=mode, order=order)["persisting_bytes"]
            if self.checked and kept:
                raise Found("guards", f"set {kept} bytes of L2 aside, which is the engine's to do")
            reply = self.runner.command("launch")
        wall = self.runner.reply_s
        times = [float(value) / 1e3 for value in reply["times_ns"]]
        for value in times:
            if not 0 < value < math.inf:
                raise RunnerFailure(f"an impossible time: {value} us", kind="Protocol")
        block = Block(times, len(order), wall * 1e6)
        if not self.checked:
            return block, None
        fingerprint = reply.get("fingerprint")
        crc = self.runner.command("hand" if fingerprint is None else "collect")["crc"]
        left = self.runner.receive(self.sets * self.plan.set_bytes, crc)
        if fingerprint is not None and int(left.view(np.int64).sum()) != fingerprint:
            raise Found("timed outputs", "the outputs were written after the call was said to end")
        return block, left.reshape(self.sets, -1)


@dataclass
class Batch:
    """Fresh problems of one shape: [sets] cases with their inputs, and the bytes that are sent."""

    cases: list[Case]
    inputs: list[Values]
    data: Bytes

    @classmethod
    def draw(cls, arm: Arm, point: Point, draw: Secrets) -> Self:
        cases = fresh(arm.op, point, arm.sets, draw)
        inputs = [cases_.make_inputs(arm.op, case, arm.device) for case in cases]
        return cls(cases, inputs, cases_.packed(arm.op, arm.plan, inputs))


def fresh(op: Op, point: Point, sets: int, draw: Secrets) -> list[Case]:
    """Cases with seeds drawn now: no timed call sees values that any call saw before. Some differ
    from another in one element of each tensor only.
    """
    scalars = tuple(scalar.value for scalar in op.contract.scalars)
    cases = [Case(point, "normal", draw.seed(), scalars) for _ in range(sets)]
    for index in range(1, sets):
        if draw.random.random() < 0.25:
            twin = cases[draw.random.randrange(index)]
            cases[index] = Case(point, "normal", twin.seed, scalars, changed=draw.seed())
    return cases


def block_sets(op: Op, point: Point, device: str) -> int:
    size = cases_.tensors_of(op, point).set_bytes
    return max(min(SETS[device], MAX_BLOCK_BYTES[device] // size), FEWEST_SETS)
