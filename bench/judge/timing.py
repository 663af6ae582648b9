"""Time candidate and baseline in alternating blocks, with new values for each call and all outputs
checked.

CPU: values reach the buffers while the process is stopped; it may run from the judge's command to
its reply, and is stopped again before the judge reads what came of it. A block's time is the CPU
time of all its threads meanwhile, by the kernel's count, less that of an empty command, divided by
its calls. CUDA: calls are captured one by one and composed into one graph in a secret order. The
graph is replayed once on new values, and a block's time is the time between two events of that
graph, divided by its calls. Some sets are never called and must stay unchanged.

A pair is one block of each arm on the same values, with arms in ABBA order and the other arm
stopped. The speedup is the Hodges-Lehmann estimate of the pairs' log-ratios with its interval, so
that a few disturbed pairs cannot produce a gain. Pairs are taken until the interval is narrow
enough or the time budget is spent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from patcher.bench.errors import BusyError
from patcher.bench.judge.cases import Secrets
from patcher.bench.judge.ceilings import ceilings, measured_again
from patcher.bench.judge.clockcheck import (
    Measured,
    Precision,
    TimedBlock,
    Traced,
    are_steady,
    below_floor,
    hidden_paid,
    left_out,
    of_pairs,
    overran,
    shared_us,
    suspicious,
    traced,
)
from patcher.bench.judge.device_code import DeviceCode
from patcher.bench.judge.disturbances import drowned, undrained, unsteady
from patcher.bench.judge.evaluation import Timing
from patcher.bench.judge.memory_file import Left
from patcher.bench.judge.planning import block_sets
from patcher.bench.judge.process import Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.timed_arm import TimedArm, WrongCall, fresh_sets, timing_method
from patcher.bench.judge.zygote import RunnerFailure
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op

CALLED = 2 / 3
"""Smallest share of the sets that is called."""
SINGLES = 4
"""CUDA: number of blocks of one call each."""
MEASUREMENTS = 5
"""Most measurements of a point. The majority decides, since a busy machine can look implausible
once, and the slowest of those that looked plausible counts."""
PAUSE_S = {"cpu": 1.0, "cuda": 4.0}
"""Seconds before the first re-measurement of a point after other programs disturbed the baseline;
doubled each time."""
COLD_CALLS = 12  # of a block with cold caches, or outside a graph
SPANS_S = 60.0
"""Seconds that a profiled launch may take; CUPTI starts slowly."""


class TimingSession:
    """Compares a candidate with a baseline point by point, each loaded in its own runner."""

    def __init__(
        self,
        op: Op,
        device: str,
        candidate: Runner,
        baseline: Runner,
        draw: Secrets,
        stock: RandomPool,
        clocks: ClockMonitor,
        threads: int | None,
        precision: Precision,
        apart: DeviceCode | None = None,
    ) -> None:
        self.op, self.device, self.clocks = op, device, clocks
        self.draw, self.stock = draw, stock
        self.theirs = TimedArm(op, device, baseline, stock, checked=False, accused=False)
        self.theirs.idle = None if apart is None else apart.left_behind
        empty = self.theirs.empty
        self.ours = TimedArm(op, device, candidate, stock, checked=True, empty=empty, apart=apart)
        self.ceilings, self.threads = ceilings(device, threads), threads
        self.precision, self.apart = precision, apart
        self.method, self.calls = timing_method(device, candidate, baseline), 0

    def compare(self, point: Point, load_timeout_s: float) -> Timing:
        """Time candidate and baseline at one point; `load_timeout_s` limits the first calls.

        Raises:
            WrongCall: a timed call failed a check, or its times are implausible.
            RunnerFailure: the candidate failed while timed.
            BusyError: this machine is too busy: the baseline's times are noisy.
        """
        sets = block_sets(self.op, point, self.device)
        for arm in (self.theirs, self.ours):
            arm.prepare(self._fresh(point, sets), load_timeout_s)
        self._carried(point, sets, load_timeout_s)
        if self.device == "cuda":
            for _ in range(2):
                self._take(self.ours, self._fresh(point, sets), sets // 2, "verified")
        measured = self._remeasured(point, sets)
        ours, theirs = measured.ours, measured.theirs
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
            dropped_pairs=measured.dropped,
            calls=sum(block.calls for block in ours),
            sol_pct=self.ceilings.sol_pct(self.op.contract, point, candidate_us),
            launch_pct=self.ceilings.launch_pct(candidate_us),
            **more,
        )

    def _carried(self, point: Point, sets: int, timeout_s: float) -> None:
        """Carry the captured calls over, if they can be; it is wrong if they are wrong there."""
        if self.apart is None:
            return
        if not self.apart.take(self._fresh(point, sets), self.stock, point, timeout_s):
            return
        try:
            self._take(self.ours, self._fresh(point, sets), sets // 2, "verified")
        except WrongCall as wrong:
            if self.apart.complete:
                detail = f"without its host code, its kernels are wrong {wrong.detail}"
                raise WrongCall("device code", detail) from wrong
            self.apart.refuse(point, f"its kernels by themselves are wrong {wrong.detail}")
        except RunnerFailure as failure:
            self.apart.refuse(point, f"its kernels by themselves fail: {failure.message}")

    def _remeasured(self, point: Point, sets: int) -> Measured:
        """Of the plausible, undisturbed measurements of a point the one in which the candidate was
        slowest. It is measured until most are, or most are not. If only outputs are checked (not
        `tells`), a disturbed one is used as well. See `compare` for what it raises.
        """
        tells = self.precision.tells
        plausible: list[Measured] = []
        problems: list[str] = []
        for number in range(MEASUREMENTS):
            last = self._measured(point, sets)
            if last.problem:
                problems.append(last.problem)
            elif last.disturbance is None or not tells:
                plausible.append(last)
            if len(plausible) > len(problems):
                return max(plausible, key=lambda each: each.ratio)
            if 2 * len(problems) > MEASUREMENTS:
                break
            if last.disturbance and tells and number < MEASUREMENTS - 1:
                time.sleep(PAUSE_S[self.device] * 2**number)
        if 2 * len(problems) > MEASUREMENTS or not tells:
            raise WrongCall("clocks", problems[-1])
        raise BusyError(
            f"this machine is too busy to time {point.label()}: {last.disturbance or problems[-1]}",
            "stop other programs, or judge on another machine (--judge)",
        )

    def _measured(self, point: Point, sets: int) -> Measured:
        ours, theirs, dropped = self._pairs(point, sets)
        single = self._one_by_one if self.device == "cpu" else self._singles
        alone = zip(*single(point, sets), strict=True)
        floor_us = self.ceilings.floor_us(self.op.contract, point)
        problem = below_floor(ours, floor_us)
        disturbance = unsteady(theirs) if self.precision.tells else None
        on_cpu = self.device == "cpu"
        if problem and on_cpu and (noise := drowned(ours, floor_us, self.ours.empty_spread_us)):
            problem, disturbance = None, noise
        elif problem:  # a busy machine may have measured the ceilings too low
            self.ceilings = measured_again(self.device, self.threads)
        if on_cpu:
            ours, theirs = undrained(ours), undrained(theirs)
            more = shared_us(ours, theirs, *alone)
            ours = [TimedBlock([block.figure + more], block.calls, block.wall_us) for block in ours]
        else:
            problem = problem or suspicious(ours, theirs, *alone)
            if self.ours.graphs is self.ours.runner:  # the clock is in the candidate's hands
                problem = problem or left_out(ours, theirs)
                ours = hidden_paid(ours, theirs)
        return Measured(ours, theirs, dropped, problem, disturbance)

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
        steady = are_steady(clocks)
        if sum(steady) < len(steady) / 2:  # this load always runs so, in both arms alike
            steady = [True] * len(steady)
        chosen = [i for i, one in enumerate(steady) if one]
        return [ours[i] for i in chosen], [theirs[i] for i in chosen], len(steady) - len(chosen)

    def _singles(self, point: Point, sets: int) -> list[tuple[TimedBlock, TimedBlock]]:
        """Pairs of blocks of one call each, so that no work can be shared between calls."""
        flip = self.draw.random.getrandbits
        return [self._pair(point, sets, bool(flip(1)), 1, exactly=1) for _ in range(SINGLES)]

    def _one_by_one(self, point: Point, sets: int) -> list[tuple[TimedBlock, TimedBlock]]:
        """The same, of calls whose values come after the call before them has ended."""
        batch, order = self._fresh(point, sets), list(range(sets))
        for arm in (self.ours, self.theirs):
            arm.ready(batch, order)
        pairs = [
            (self.ours.call_alone(batch, index), self.theirs.call_alone(batch, index))
            for index in order
        ]
        self._check(batch, self.ours.runner.sets.left(batch.plan, sets), order)
        return pairs

    def _pair(
        self, point: Point, sets: int, swapped: bool, least: int, exactly: int | None = None
    ) -> tuple[TimedBlock, TimedBlock]:
        batch = self._fresh(point, sets)
        order = self.draw.order(sets, least)[:exactly]
        blocks: dict[bool, TimedBlock] = {}
        for is_ours in (False, True) if swapped else (True, False):
            if is_ours:
                blocks[True] = self._checked(batch, order, "whole")
            else:
                self.ours.runner.stop()  # until its next command
                blocks[False] = self.theirs.block(batch, order)[0]
        return blocks[True], blocks[False]

    def _fresh(self, point: Point, sets: int) -> CallSets:
        return fresh_sets(self.op, point, sets, self.device, self.stock, self.draw)

    def _take(self, arm: TimedArm, batch: CallSets, least: int, mode: str) -> TimedBlock:
        order = self.draw.order(len(batch.cases), least)
        if mode in ("cold", "eager"):
            order = order[:COLD_CALLS]
        return (
            self._checked(batch, order, mode) if arm.checked else arm.block(batch, order, mode)[0]
        )

    def followed(self, points: Sequence[Point], load_timeout_s: float) -> str:
        """Call the candidate behind a kernel that writes its inputs late.

        That kernel lets its dependents begin at once (programmatic dependent launch), as a kernel
        of an engine may. The point is drawn from `points`.

        Returns:
            The result in words.

        Raises:
            WrongCall: the candidate did not wait for its inputs.
            RunnerFailure: the process ended, or the call cannot be captured there.
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
        batch.send(runner)
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
        """Profile one launch with CUPTI, at a point drawn from `points`.

        This comes last, since a process that was profiled stays slower.

        Raises:
            WrongCall: more ran than the events account for.
            RunnerFailure: the process ended.
        """
        point = self.draw.random.choice(points)
        sets = block_sets(self.op, point, self.device)
        self.ours.prepare(self._fresh(point, sets), load_timeout_s)
        self._carried(point, sets, load_timeout_s)
        order = self.draw.order(sets, max(int(CALLED * sets), 1))
        try:
            spans, events_ns = self.ours.spans(self._fresh(point, sets), order, SPANS_S)
        except RunnerFailure as failure:
            if failure.fatal:
                raise
            return Traced(f"CUPTI cannot be asked here: {failure.message}"[:200], {})
        if not spans:
            return Traced("CUPTI saw no kernel", {})
        if problem := overran(spans, events_ns):
            raise WrongCall("clocks", f"{point.label()}: {problem}")
        return traced(spans, len(order), point.label())

    def _served_otherwise(self, point: Point, sets: int) -> dict[str, float]:
        """Median times with L2 overwritten before each call, and outside a graph."""
        return {
            f"{name}_{mode}_us": self._take(arm, self._fresh(point, sets), COLD_CALLS, mode).figure
            for mode in ("cold", "eager")
            for name, arm in (("candidate", self.ours), ("baseline", self.theirs))
        }

    def _checked(self, batch: CallSets, order: list[int], mode: str) -> TimedBlock:
        """Time a block of the candidate and check the outputs of the timed calls."""
        block, left = self.ours.block(batch, order, mode)
        assert left is not None
        self._check(batch, left, order)
        return block

    def _check(self, batch: CallSets, left: Left, order: list[int]) -> None:
        if problem := batch.problem(left, order):
            check, detail = problem
            name = "timed outputs" if check == "values" else check
            raise WrongCall(name, f"in a timed call: {detail}")
        self.calls += len(order)
