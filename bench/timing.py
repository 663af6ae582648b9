"""How fast, against what: blocks of candidate and baseline in turn, each call on values of its
own, every output checked.

CPU: each call timed by itself with the performance counter; a block's figure is the median of its
calls. CUDA: one call per buffer set captured in a CUDA graph, as engines serve; a block's figure
is one replay between events divided by its calls. New values go into the buffers before every
replay. A pair is one block of each arm on the same values, arms in ABBA order; the speedup is the
geometric mean over pairs with a Student t interval of the log-ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from scipy import stats

from bench.clocks import ClockMonitor
from bench.errors import MissingError
from bench.evaluation import Timing, geomean
from bench.judge import cases as cases_
from bench.judge.cases import Case
from bench.judge.process import Runner, RunnerFailure
from bench.op import Op, Point, Sweep

SETS = {"cpu": 24, "cuda": 32}
"""Calls a block, each on a buffer set of its own."""
MAX_BLOCK_BYTES = 16 << 20
METHODS = {
    "cpu": "per call, performance counter, median of a block; interleaved ABBA pairs; "
    "caches warm from the copy-in",
    "cuda": "CUDA graph replay of one call per buffer set, events; interleaved ABBA pairs; "
    "L2 warm from the copy-in",
}


class Sitting:
    """Candidate and baseline, each loaded in a runner of its own, compared point by point."""

    def __init__(
        self,
        op: Op,
        sweep: Sweep,
        device: str,
        runner: Runner,
        baseline: Runner,
        pairs: int,
        clocks: ClockMonitor,
    ) -> None:
        self.op, self.sweep, self.device = op, sweep, device
        self.runner, self.baseline, self.pairs = runner, baseline, pairs
        self.method = METHODS[device]
        self.captured_by_baseline = False
        self.clocks = clocks

    def compare(self, point: Point, load_timeout_s: float) -> tuple[Timing, tuple[str, str] | None]:
        """The timing at one point, and (check, detail) where a timed call went wrong.

        Raises:
            RunnerFailure: the candidate failed while timed.
        """
        sets = block_sets(self.op, point, self.device)
        for arm in (self.baseline, self.runner):
            prepare(self.op, point, self.device, arm, sets, load_timeout_s)
            self.captured_by_baseline = self.device == "cuda"
        candidate_us, baseline_us, ratios = [], [], []
        for pair in range(self.pairs + 1):
            block = fresh_block(self.op, point, sets)
            order = [self.runner, self.baseline] if pair % 2 else [self.baseline, self.runner]
            self.clocks.sample()
            took = {
                arm is self.runner: timed(self.op, point, self.device, arm, block) for arm in order
            }
            if problem := self._problem(block):
                return _timing(point, [1.0], [1.0], [1.0, 1.0], sets), problem
            if pair == 0:
                continue  # warm-up: caches, clocks, branch predictors
            candidate_us.append(took[True])
            baseline_us.append(took[False])
            ratios.append(math.log(took[False] / took[True]))
        return _timing(point, candidate_us, baseline_us, ratios, sets), None

    def _problem(self, block: list[Case]) -> tuple[str, str] | None:
        """Check the outputs of the very calls that were timed."""
        plan = cases_.tensors_of(self.op, block[0].point)
        for case, got in zip(block, cases_.receive(self.runner, plan, len(block)), strict=True):
            inputs = cases_.make_inputs(self.op, case)
            if problem := cases_.guard_problem(self.op, inputs, got):
                return "guards", f"in a timed call: {problem}"
            if problem := cases_.value_problem(
                self.op, case, cases_.expect(self.op, case, inputs), got.values
            ):
                return "timed outputs", problem
        return None


def strongest(
    op: Op,
    sweep: Sweep,
    device: str,
    runner: Runner,
    names: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> tuple[dict[str, str], str]:
    """Time every baseline that runs here over the whole sweep; leave the fastest loaded.

    Returns each baseline's geometric mean time or why it does not run, and the name of the fastest.

    Raises:
        MissingError: none runs.
    """
    found: dict[str, str] = {}
    times: dict[str, float] = {}
    for index, name in enumerate(names):
        progress("baselines", index, len(names))
        try:
            runner.command("baseline", 600, op=op.name, name=name)
            medians = []
            for point in sweep.points():
                sets = block_sets(op, point, device)
                prepare(op, point, device, runner, sets, 600)
                blocks = [
                    timed(op, point, device, runner, fresh_block(op, point, sets)) for _ in range(5)
                ]
                medians.append(statistics.median(blocks[1:]))
            times[name] = geomean(medians)
            found[name] = f"{times[name]:.3g} us"
        except RunnerFailure as failure:
            if failure.kind not in ("ImportError", "ModuleNotFoundError"):
                found[name] = f"failed: {failure.message.splitlines()[0][:200]}"
            else:
                found[name] = f"not here: {failure.message.split(': ', 1)[-1][:200]}"
    if not times:
        raise MissingError(f"no baseline of {op.name} runs here: {found}", "see `patcher doctor`")
    best = min(times, key=lambda name: times[name])
    runner.command("baseline", 600, op=op.name, name=best)
    return found, best


def block_sets(op: Op, point: Point, device: str) -> int:
    size = cases_.tensors_of(op, point).set_bytes
    return max(min(SETS[device], MAX_BLOCK_BYTES // size), 2)


def fresh_block(op: Op, point: Point, sets: int) -> list[Case]:
    """Cases with seeds drawn now: no timed call sees values that any call saw before."""
    import secrets

    scalars = tuple(scalar.value for scalar in op.contract.scalars)
    return [Case(point, "normal", secrets.randbits(62), scalars) for _ in range(sets)]


def prepare(op: Op, point: Point, device: str, runner: Runner, sets: int, timeout_s: float) -> None:
    """First calls at a shape: compile what is compiled late, and capture the graph on CUDA."""
    plan = cases_.tensors_of(op, point)
    block = fresh_block(op, point, sets)
    cases_.send(runner, plan, [cases_.make_inputs(op, case) for case in block])
    arguments: dict[str, Any] = {
        "layout": plan.model_dump(),
        "scalars": list(block[0].scalars),
        "sets": sets,
    }
    runner.command("run", timeout_s, **arguments)
    if device == "cuda":
        cases_.send(runner, plan, [cases_.make_inputs(op, case) for case in block])
        runner.command("graph", timeout_s, label=point.label(), **arguments)


def timed(op: Op, point: Point, device: str, runner: Runner, block: list[Case]) -> float:
    """Microseconds of one call in one block."""
    plan = cases_.tensors_of(op, point)
    cases_.send(runner, plan, [cases_.make_inputs(op, case) for case in block])
    if device == "cuda":
        reply = runner.command("replay", label=point.label(), sets=len(block))
        if reply["times_ns"][0] * len(block) > reply["wall_ns"]:
            raise RunnerFailure(
                "its clocks disagree: events report more than the wall clock", kind="Protocol"
            )
    else:
        reply = runner.command(
            "run", layout=plan.model_dump(), scalars=list(block[0].scalars), sets=len(block)
        )
    median = statistics.median(float(value) for value in reply["times_ns"]) / 1000
    if not 0 < median < math.inf:
        raise RunnerFailure(f"an impossible time: {median} us", kind="Protocol")
    return median


def _timing(
    point: Point,
    candidate_us: list[float],
    baseline_us: list[float],
    ratios: list[float],
    sets: int,
) -> Timing:
    mean, spread = statistics.fmean(ratios), statistics.stdev(ratios)
    half = float(stats.t.ppf(0.975, len(ratios) - 1)) * spread / math.sqrt(len(ratios))
    return Timing(
        axes=point.axes,
        candidate_us=statistics.median(candidate_us),
        baseline_us=statistics.median(baseline_us),
        speedup=math.exp(mean),
        speedup_low=math.exp(mean - half),
        speedup_high=math.exp(mean + half),
        pairs=len(ratios),
        calls=len(ratios) * sets,
    )
