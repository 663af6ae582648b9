"""How fast, against what: blocks of candidate and baseline in turn, each call on values of its
own, every output checked.

CPU: each call timed by itself with the performance counter; a block's figure is the median of its
calls. CUDA: calls captured one by one, composed into one graph in a secret order, as engines serve
them, and replayed once on new values; a block's figure is the time between two events of that graph
divided by its calls. Some sets are never called and must stay as they were. A pair is one block of
each arm on the same values, arms in ABBA order, the other arm stopped; the speedup is the
pseudomedian of the pairs' log-ratios with its interval, since a few pairs during which the baseline
waited for other programs must not make a gain. Pairs go on until the interval is narrow enough or
the budget is spent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from patcher.bench.errors import MissingError
from patcher.bench.judge.cases import Secrets
from patcher.bench.judge.ceilings import Ceilings
from patcher.bench.judge.clockcheck import (
    TimedBlock,
    Traced,
    blind,
    overran,
    suspicious,
    traced,
    unsteady,
)
from patcher.bench.judge.evaluation import Timing
from patcher.bench.judge.planning import block_sets
from patcher.bench.judge.process import Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.timed_arm import TimedArm, WrongCall, fresh_sets
from patcher.bench.judge.zygote import RunnerFailure
from patcher.bench.machine.clocks import TOLERANCE, ClockMonitor
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op
from patcher.bench.stats.hodges_lehmann import Interval, hodges_lehmann

CALLED = 2 / 3
"""At least this share of the sets is called."""
SINGLES = 4
"""Blocks of one call each."""
MEASUREMENTS = 5
"""A point is measured so often before its clocks are called false, if most of the times looked so:
a busy machine looks so, too."""
FEWEST_PAIRS = 6
"""Of fewer, Student's quantile makes any machine a busy one."""
PAUSE_S = 4.0
"""Before a point is measured again because the baseline waited for other programs; then twice as
long each time: a minute in all."""
COLD_CALLS = 12
SPANS_S = 60.0
"""CUPTI starts slowly."""
METHODS = {
    "cpu": "per call, performance counter, median of a block; interleaved ABBA pairs, "
    "the other arm stopped; caches warm from the copy-in",
    "cuda": "calls captured one by one, composed in secret order, one graph replay between events; "
    "interleaved ABBA pairs; L2 warm from the copy-in (cold figures beside it)",
}


@dataclass
class Precision:
    """When a point has been measured enough."""

    fewest_pairs: int = FEWEST_PAIRS
    most_pairs: int = 24
    half_width: float = 0.01
    """Of the log-ratio's 95 % interval."""
    budget_s: float = 20.0

    @property
    def tells(self) -> bool:
        """Whether a ratio is asked for, and not only that timed calls are right."""
        return self.most_pairs >= FEWEST_PAIRS


class TimingSession:
    """Candidate and baseline, each loaded in a runner of its own, compared point by point."""

    def __init__(
        self,
        op: Op,
        device: str,
        candidate: Runner,
        baseline: Runner,
        draw: Secrets,
        stock: RandomPool,
        clocks: ClockMonitor,
        ceilings: Ceilings,
        precision: Precision,
    ) -> None:
        self.op, self.device, self.clocks = op, device, clocks
        self.draw, self.stock = draw, stock
        self.ours = TimedArm(op, device, candidate, stock, checked=True)
        self.theirs = TimedArm(op, device, baseline, stock, checked=False, accused=False)
        self.ceilings, self.precision = ceilings, precision
        self.method = METHODS[device]
        self.calls = 0

    def compare(self, point: Point, load_timeout_s: float) -> Timing:
        """The timing at one point.

        Raises:
            Found: a timed call went wrong, or the clocks do not agree.
            RunnerFailure: the candidate failed while timed.
            MissingError: the baseline's own times are all over the place, or the judge's clock over
                them.
        """
        sets = block_sets(self.op, point, self.device)
        for arm in (self.theirs, self.ours):
            arm.prepare(self._fresh(point, sets), load_timeout_s)
        if self.device == "cuda":
            for _ in range(2):
                self._take(self.ours, self._fresh(point, sets), sets // 2, "verified")
        ours, theirs, dropped = self._remeasured(point, sets)
        speedup = of_pairs(ours, theirs)
        candidate_us = statistics.median(block.figure for block in ours)
        more = self._served_otherwise(point, sets) if self.device == "cuda" else {}
        return Timing(
            axes=point.axes,
            candidate_us=candidate_us,
            baseline_us=statistics.median(block.figure for block in theirs),
            speedup=math.exp(speedup.middle),
            speedup_low=math.exp(speedup.low),
            speedup_high=math.exp(speedup.high),
            pairs=len(ours),
            dropped_pairs=dropped,
            calls=sum(block.calls for block in ours),
            sol_pct=100 * self.ceilings.sol_us(self.op.contract, point) / candidate_us,
            launch_pct=self.ceilings.launch_pct(candidate_us),
            **more,
        )

    def _remeasured(
        self, point: Point, sets: int
    ) -> tuple[list[TimedBlock], list[TimedBlock], int]:
        """Blocks of both arms and how many pairs were dropped, of the first hearing that tells; a
        quick look (not `tells`) goes on with the last. Raises: see `compare`.
        """
        problems: list[str] = []
        hearing, tells = 0, self.precision.tells
        while True:
            hearing += 1
            ours, theirs, dropped = self._pairs(point, sets)
            alone = [self._single(point, sets) for _ in range(SINGLES)]
            floor = self.ceilings.floor_us(self.op.contract, point)
            problem = suspicious(ours, theirs, [a for a, _ in alone], [b for _, b in alone], floor)
            waited = self._waited(theirs)
            problems += [problem] if problem else []
            if problem is None and waited is None:
                return ours, theirs, dropped
            if hearing == MEASUREMENTS:
                break
            if waited and tells:
                time.sleep(PAUSE_S * 2 ** (hearing - 1))
        if problems and (2 * len(problems) > MEASUREMENTS or not tells):
            raise WrongCall("clocks", problems[-1])
        if tells:
            raise MissingError(
                f"this machine is too busy to time {point.label()}: {waited or problems[-1]}",
                "end what else runs here, or judge on another machine (--judge)",
            )
        return ours, theirs, dropped

    def _waited(self, theirs: Sequence[TimedBlock]) -> str | None:
        """Whether what the baseline's blocks say of this machine makes a hearing worth nothing. On
        CUDA the times are those of events, and CUPTI sees what they leave out.
        """
        if self.precision.tells and (problem := unsteady(theirs)):
            return problem
        return blind(theirs) if self.device == "cpu" else None

    def _pairs(self, point: Point, sets: int) -> tuple[list[TimedBlock], list[TimedBlock], int]:
        ours: list[TimedBlock] = []
        theirs: list[TimedBlock] = []
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
            late = time.monotonic() - begin > limits.budget_s
            if of_pairs(ours, theirs).half_width <= limits.half_width or late:
                break
        kept = _steady(clocks)
        if sum(kept) < len(kept) / 2:  # this load's own state, for both arms alike
            kept = [True] * len(kept)
        dropped = len(kept) - sum(kept)
        chosen = [i for i, keep in enumerate(kept) if keep]
        return [ours[i] for i in chosen], [theirs[i] for i in chosen], dropped

    def _single(self, point: Point, sets: int) -> tuple[TimedBlock, TimedBlock]:
        """One call alone: nothing else is there to be computed with it."""
        return self._pair(point, sets, bool(self.draw.random.getrandbits(1)), 1, exactly=1)

    def _pair(
        self, point: Point, sets: int, swapped: bool, least: int, exactly: int | None = None
    ) -> tuple[TimedBlock, TimedBlock]:
        batch = self._fresh(point, sets)
        order = self.draw.order(sets, least)[:exactly]
        taken: dict[bool, TimedBlock] = {}
        for is_ours in (False, True) if swapped else (True, False):
            if is_ours:
                taken[True] = self._checked(batch, order, "whole")
            else:
                self.ours.runner.freeze(True)
                try:
                    taken[False] = self.theirs.block(batch, order)[0]
                finally:
                    self.ours.runner.freeze(False)
        return taken[True], taken[False]

    def _fresh(self, point: Point, sets: int) -> CallSets:
        return fresh_sets(self.op, point, sets, self.device, self.stock, self.draw)

    def _take(self, arm: TimedArm, batch: CallSets, least: int, mode: str) -> TimedBlock:
        order = self.draw.order(len(batch.cases), least)
        if mode in ("cold", "eager"):
            order = order[:COLD_CALLS]
        if arm.checked:
            return self._checked(batch, order, mode)
        return arm.block(batch, order, mode)[0]

    def followed(self, points: Sequence[Point], load_timeout_s: float) -> str:
        """How a call does at one of these points right behind a kernel that writes its inputs late
        and lets its dependents begin at once, as engines may have one there.

        Raises:
            Found: it did not wait.
            RunnerFailure: the process is gone, or the call cannot be captured there.
        """
        runner = self.ours.runner
        if runner.no_late_writer:
            return f"not tried behind a kernel that writes late: {runner.no_late_writer}"[:200]
        point = self.draw.random.choice(points)
        sets = block_sets(self.op, point, self.device)
        self.ours.prepare(self._fresh(point, sets), load_timeout_s)
        batch = self._fresh(point, sets)
        index = self.draw.random.randrange(sets)
        unlike = [i for i in range(sets) if batch.cases[i].seed != batch.cases[index].seed]
        runner.send(batch.data)
        runner.command(
            "follow",
            load_timeout_s,
            index=index,
            other=self.draw.random.choice(unlike),
            scalars=list(batch.cases[index].scalars),
            recipes=batch.recipes,
        )
        left = runner.left("collect", batch.plan, sets)
        if problem := batch.problem(left, [index]):
            raise WrongCall(
                "stream order",
                f"it begins before the kernel in front of it has written: {problem[1]}",
            )
        return "waits for a kernel in front of it that lets its dependents begin early"

    def traced(self, points: Sequence[Point], load_timeout_s: float) -> Traced:
        """What CUPTI saw of one launch at one of these points, drawn now.

        Last, since a process that was profiled is no longer as fast as the other.

        Raises:
            Found: more ran than the events account for.
            RunnerFailure: the process is gone.
        """
        point = self.draw.random.choice(points)
        sets = block_sets(self.op, point, self.device)
        self.ours.prepare(self._fresh(point, sets), load_timeout_s)
        order = self.draw.order(sets, max(int(CALLED * sets), 1))
        try:
            reply = self.ours.runner.command("spans", SPANS_S, order=order)
        except RunnerFailure as failure:
            if failure.fatal:
                raise
            return Traced(f"CUPTI cannot be asked here: {failure.message}"[:200], {})
        spans = [(str(name), int(begin), int(end)) for name, begin, end in reply["spans"]]
        if not spans:
            return Traced("CUPTI saw no kernel", {})
        if problem := overran(spans, float(reply["times_ns"][0]) * len(order)):
            raise WrongCall("clocks", f"{point.label()}: {problem}")
        return traced(spans, len(order), point.label())

    def _served_otherwise(self, point: Point, sets: int) -> dict[str, float]:
        """Medians with L2 overwritten before each call, and outside of a graph."""
        found: dict[str, float] = {}
        for mode in ("cold", "eager"):
            for name, arm in (("candidate", self.ours), ("baseline", self.theirs)):
                block = self._take(arm, self._fresh(point, sets), COLD_CALLS, mode)
                found[f"{name}_{mode}_us"] = block.figure
        return found

    def _checked(self, batch: CallSets, order: list[int], mode: str) -> TimedBlock:
        """A block of the candidate's; the outputs of the very calls that were timed are checked."""
        block, left = self.ours.block(batch, order, mode)
        assert left is not None
        if problem := batch.problem(left, order):
            check, detail = problem
            name = "timed outputs" if check == "values" else check
            raise WrongCall(name, f"in a timed call: {detail}")
        self.calls += len(order)
        return block


def of_pairs(ours: Sequence[TimedBlock], theirs: Sequence[TimedBlock]) -> Interval:
    """Of the logarithm of the speedup."""
    return hodges_lehmann(
        [math.log(b.figure / a.figure) for a, b in zip(ours, theirs, strict=True)]
    )


def _steady(clocks: list[int | None]) -> list[bool]:
    """Which pairs neither throttled nor drifted; without clocks, all."""
    seen = [clock for clock in clocks if clock]
    if not seen:
        return [clock is not None for clock in clocks]
    middle = statistics.median(seen)
    return [clock is not None and abs(clock - middle) <= TOLERANCE * middle for clock in clocks]
