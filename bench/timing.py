"""How fast, against what: blocks of candidate and baseline in turn, each call on values of its
own, every output checked.

CPU: each call timed by itself with the performance counter; a block's figure is the median of its
calls. CUDA: calls captured one by one, composed into one graph in a secret order, as engines serve
them, and replayed once on new values; a block's figure is the time between two events of that graph
divided by its calls. Some sets are never called and must stay as they were. A pair is one block of
each arm on the same values, arms in ABBA order, the other arm stopped; the speedup is the geometric
mean over pairs with a Student t interval of the log-ratios. Pairs go on until the interval is
narrow enough or the budget is spent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from bench.ceilings import Ceilings
from bench.clocks import TOLERANCE, ClockMonitor
from bench.contract import Point
from bench.errors import MissingError
from bench.evaluation import Timing
from bench.judge import cases as cases_
from bench.judge.blob import Bytes, Layout
from bench.judge.cases import Case, Secrets, Values
from bench.judge.clockcheck import Block, suspicious
from bench.judge.process import Runner
from bench.judge.zygote import RunnerFailure
from bench.op import Op
from bench.stats import half_width

SETS = {"cpu": 16, "cuda": 32}
"""Buffer sets of a block."""
MAX_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 16 << 20}
FEWEST_SETS = 4
CALLED = 2 / 3
"""At least this share of the sets is called."""
SINGLES = 4
"""Blocks of one call each."""
HEARINGS = 5
"""A point is measured so often before its clocks are called false: a busy machine looks so once."""
COLD_CALLS = 12
METHODS = {
    "cpu": "per call, performance counter, median of a block; interleaved ABBA pairs, "
    "the other arm stopped; caches warm from the copy-in",
    "cuda": "calls captured one by one, composed in secret order, one graph replay between events; "
    "interleaved ABBA pairs; L2 warm from the copy-in (cold figures beside it)",
}


class Found(Exception):
    """Something wrong in timed calls: (check, detail)."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(detail)
        self.check, self.detail = check, detail


@dataclass
class Precision:
    """When a point has been measured enough."""

    fewest_pairs: int = 6
    most_pairs: int = 24
    half_width: float = 0.01
    """Of the log-ratio's 95 % interval."""
    budget_s: float = 20.0


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


class Sitting:
    """Candidate and baseline, each loaded in a runner of its own, compared point by point."""

    def __init__(
        self,
        op: Op,
        device: str,
        candidate: Runner,
        baseline: Runner,
        draw: Secrets,
        clocks: ClockMonitor,
        ceilings: Ceilings,
        precision: Precision,
    ) -> None:
        self.op, self.device, self.draw, self.clocks = op, device, draw, clocks
        self.ours = Arm(op, device, candidate, checked=True)
        self.theirs = Arm(op, device, baseline, checked=False, accused=False)
        self.ceilings, self.precision = ceilings, precision
        self.method = METHODS[device]
        self.calls = 0

    def compare(self, point: Point, load_timeout_s: float) -> Timing:
        """The timing at one point.

        Raises:
            Found: a timed call went wrong, or the clocks do not agree.
            RunnerFailure: the candidate failed while timed.
        """
        sets = block_sets(self.op, point, self.device)
        for arm in (self.theirs, self.ours):
            arm.prepare(point, sets, self.draw, load_timeout_s)
        if self.device == "cuda":
            for _ in range(2):
                self._take(
                    self.ours, Batch.draw(self.ours, point, self.draw), sets // 2, "verified"
                )
        problem: str | None = ""
        for _ in range(HEARINGS):
            ours, theirs, dropped = self._pairs(point, sets)
            alone = [self._single(point, sets) for _ in range(SINGLES)]
            floor = self.ceilings.floor_us(self.op.contract, point)
            problem = suspicious(ours, theirs, [a for a, _ in alone], [b for _, b in alone], floor)
            if problem is None:
                break
        else:
            raise Found("clocks", problem or "")
        ratios = [math.log(b.figure / a.figure) for a, b in zip(ours, theirs, strict=True)]
        mean, half = statistics.fmean(ratios), half_width(ratios)
        candidate_us = statistics.median(block.figure for block in ours)
        more = self._served_otherwise(point, sets) if self.device == "cuda" else {}
        return Timing(
            axes=point.axes,
            candidate_us=candidate_us,
            baseline_us=statistics.median(block.figure for block in theirs),
            speedup=math.exp(mean),
            speedup_low=math.exp(mean - half),
            speedup_high=math.exp(mean + half),
            pairs=len(ratios),
            dropped_pairs=dropped,
            calls=sum(block.calls for block in ours),
            light_pct=100 * self.ceilings.light_us(self.op.contract, point) / candidate_us,
            **more,
        )

    def _pairs(self, point: Point, sets: int) -> tuple[list[Block], list[Block], int]:
        ours: list[Block] = []
        theirs: list[Block] = []
        clocks: list[int | None] = []
        begin, limits = time.monotonic(), self.precision
        for pair in range(limits.most_pairs + 1):
            sample = self.clocks.sample()
            a, b = self._pair(point, sets, pair % 2 == 0, max(int(CALLED * sets), 1))
            if pair == 0:
                continue  # warm-up: caches, clocks, branch predictors
            ours.append(a)
            theirs.append(b)
            clocks.append(None if sample.throttle else sample.sm_mhz or 0)
            if len(ours) < limits.fewest_pairs:
                continue
            ratios = [math.log(b.figure / a.figure) for a, b in zip(ours, theirs, strict=True)]
            late = time.monotonic() - begin > limits.budget_s
            if half_width(ratios) <= limits.half_width or late:
                break
        kept = _steady(clocks)
        if sum(kept) < len(kept) / 2:  # this load's own state, for both arms alike
            kept = [True] * len(kept)
        dropped = len(kept) - sum(kept)
        chosen = [i for i, keep in enumerate(kept) if keep]
        return [ours[i] for i in chosen], [theirs[i] for i in chosen], dropped

    def _single(self, point: Point, sets: int) -> tuple[Block, Block]:
        """One call alone: nothing else is there to be computed with it."""
        return self._pair(point, sets, bool(self.draw.random.getrandbits(1)), 1, exactly=1)

    def _pair(
        self, point: Point, sets: int, swapped: bool, least: int, exactly: int | None = None
    ) -> tuple[Block, Block]:
        batch = Batch.draw(self.ours, point, self.draw)
        order = self.draw.order(sets, least)[:exactly]
        taken: dict[bool, Block] = {}
        for is_ours in (False, True) if swapped else (True, False):
            if is_ours:
                taken[True] = self._checked(batch, order, "whole")
            else:
                self.ours.runner.freeze(True)
                try:
                    taken[False] = self.theirs.block(batch.data, order)[0]
                finally:
                    self.ours.runner.freeze(False)
        return taken[True], taken[False]

    def _take(self, arm: Arm, batch: Batch, least: int, mode: str) -> Block:
        order = self.draw.order(len(batch.cases), least)
        if mode in ("cold", "eager"):
            order = order[:COLD_CALLS]
        if arm.checked:
            return self._checked(batch, order, mode)
        return arm.block(batch.data, order, mode)[0]

    def _served_otherwise(self, point: Point, sets: int) -> dict[str, float]:
        """Medians with L2 overwritten before each call, and outside of a graph."""
        found: dict[str, float] = {}
        for mode in ("cold", "eager"):
            for name, arm in (("candidate", self.ours), ("baseline", self.theirs)):
                block = self._take(arm, Batch.draw(self.ours, point, self.draw), COLD_CALLS, mode)
                found[f"{name}_{mode}_us"] = block.figure
        return found

    def _checked(self, batch: Batch, order: list[int], mode: str) -> Block:
        """A block of the candidate's; the outputs of the very calls that were timed are checked."""
        block, left = self.ours.block(batch.data, order, mode)
        assert left is not None
        plan, decoys = self.ours.plan, sorted(set(range(len(batch.cases))) - set(order))
        if not np.array_equal(left[decoys], batch.data[decoys]):
            raise Found("guards", "wrote to buffers of a call that was never made")
        cases = [batch.cases[index] for index in order]
        expected = [cases_.expect(self.op, batch.cases[i], batch.inputs[i]) for i in order]
        sent, got = batch.data[order], left[order]
        if problem := cases_.problem(self.op, plan, cases, expected, sent, got):
            check, detail = problem
            name = "timed outputs" if check == "values" else check
            raise Found(name, f"in a timed call: {detail}")
        self.calls += len(order)
        return block


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


def _steady(clocks: list[int | None]) -> list[bool]:
    """Which pairs neither throttled nor drifted; without clocks, all."""
    seen = [clock for clock in clocks if clock]
    if not seen:
        return [clock is not None for clock in clocks]
    middle = statistics.median(seen)
    return [clock is not None and abs(clock - middle) <= TOLERANCE * middle for clock in clocks]
