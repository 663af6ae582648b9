"""One candidate in one runner: its checks, and the outcome of each failure."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from patcher.bench.errors import VerificationError
from patcher.bench.judge import JudgeSettings, Progress
from patcher.bench.judge import cases as cases_
from patcher.bench.judge.cases import Case, Secrets
from patcher.bench.judge.clockcheck import FEWEST_PAIRS, Precision
from patcher.bench.judge.device_code import DeviceCode
from patcher.bench.judge.evaluation import Check, Evaluation, Outcome, Timing
from patcher.bench.judge.memory_file import Left
from patcher.bench.judge.planning import soaked_calls, soaked_sets
from patcher.bench.judge.process import Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sanitizer import Sanitized, sanitize
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.timed_arm import WrongCall, fresh, make_ready
from patcher.bench.judge.timing import TimingSession
from patcher.bench.judge.zygote import ForgedReplyError, RunnerFailure, placed
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe
from patcher.bench.ops.candidate import Candidate
from patcher.bench.ops.contract import Sweep
from patcher.bench.ops.op import Op
from patcher.bench.toolchains import Built

AFTER = 6
"""Correctness cases that are repeated, with other seeds, after the timed calls."""
ALIKE = 3
"""Consecutive calls on equal inputs, each at other addresses."""
LONGER = 10
"""Factor on such calls for a candidate whose races the sanitizer cannot judge."""


@dataclass
class TrialState:
    candidate: Candidate
    device: str
    begin: float = field(default_factory=time.monotonic)
    checks: list[Check] = field(default_factory=list)
    build: Built | None = None
    sandbox: str = "nothing of it was run"
    outputs: Any = None
    """SHA-256 of all outputs compared; None: of secret inputs nothing could be compared with it."""
    tripwires: tuple[str, ...] = ()

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(name=name, passed=passed, detail=detail))

    def verdict(self, outcome: Outcome, log: str = "", **more: Any) -> Evaluation:
        return Evaluation(
            op=self.candidate.op,
            language=self.candidate.language,
            digest=self.candidate.digest,
            outcome=outcome,
            checks=tuple(self.checks),
            tripwires=self.tripwires,
            log=log,
            sandbox=self.sandbox,
            outputs_sha256=self.outputs and self.outputs.hexdigest(),
            build_s=self.build.seconds if self.build else None,
            total_s=time.monotonic() - self.begin,
            **{"environment": describe(self.device, compiler=self._compiler()), **more},
        )

    def _compiler(self) -> str | None:
        """The compiler's result for a language that can only be compiled."""
        only = self.build is not None and self.candidate.language.compile_only
        return self.build.command.split()[0] if self.build and only else None


class Wrong(Exception):
    """A final verdict: an outcome, a failed check, and feedback for the agent."""

    def __init__(self, outcome: Outcome, check: str, detail: str, log: str = "") -> None:
        super().__init__(detail)
        self.outcome, self.check, self.detail, self.log = outcome, check, detail, log


class Trial:
    """One candidate in one runner."""

    def __init__(
        self,
        state: TrialState,
        op: Op,
        sweep: Sweep,
        runner: Runner,
        settings: JudgeSettings,
        draw: Secrets,
    ) -> None:
        self.state, self.op, self.sweep, self.runner = state, op, sweep, runner
        self.settings, self.draw = settings, draw
        self.planted = self.rejected = self.compared = self.calls = 0
        self.begin = time.monotonic()
        self.stock = RandomPool(op, sweep, state.device, draw)
        self.traced = self.followed = self.graded = ""
        """Results of CUPTI, of the late-writing kernel and of the hand-over, if they were run."""
        self.bits: list[int] = []  # a digest of what each checked call left

    def load(self, built: Built, cpus: list[int] | None) -> None:
        portable = self.state.device == "cuda" and self.settings.device_code
        self.runner.start(self.settings.threads, cpus, portable)
        self.state.sandbox = self.runner.confinement
        place = str(placed(built, self.runner.folder))
        self.told = {"path": place, "binding": built.binding, "entry": self.op.name}
        self.load_build("load")

    def load_build(self, check: str) -> None:
        """Load the build, in place of the one before; from then on the candidate owns its file."""
        try:
            self.runner.command("candidate", self.settings.load_timeout_s, **self.told)
        except RunnerFailure as failure:
            raise self._failed(failure, check, failure.message) from failure

    def correct(self, cases: Sequence[Case], report: Progress, name: str = "values") -> None:
        """Check every case against float64; the first error decides."""
        for index, case in enumerate(cases):
            report("check", index, len(cases))
            self.one(case, name)
        report("check", len(cases), len(cases))

    def one(self, case: Case, name: str, known: int | None = None) -> bool:
        """Check a case; False: it gave the bits that are known to be right."""
        op, sets = self.op, self._made([case])
        left = self._called(sets)
        self.bits.append(sets.bits(left) if self.told["binding"] == "python" else 0)
        if self.bits[-1] == known:
            return False
        inputs = sets.inputs[0]
        expected = cases_.expect(op, case, inputs)
        if problem := sets.problem_with([expected], left, [0]):
            raise _wrong(problem, name, case.label())
        if name == "values" and self.state.outputs is not None:
            sets.add_outputs(left, self.state.outputs)
        self.compared += 1
        if case.regime == "normal" and case.point in self.sweep.points():
            control = cases_.planted(op, case, inputs)
            self.planted += 1
            self.rejected += cases_.value_problem(op, [case], [expected], [control]) is not None
        return True

    def _made(self, cases: Sequence[Case]) -> CallSets:
        return CallSets.made(self.op, cases, self.state.device, self.stock)

    def _called(self, sets: CallSets) -> Left:
        count = len(sets.cases)
        try:
            late = self.state.candidate.language.traits.compiles_late
            limit = self.settings.load_timeout_s if late else None
            if self.state.device == "cpu":
                order = list(range(count))
                make_ready(self.runner, sets, order)
                self.runner.clocked("go", limit, keep=True)
                return self.runner.sets.kept(sets.plan, count, order)
            self.stock.lend(self.runner)
            sets.send(self.runner)
            self.runner.command("call", limit, **sets.told(), order=list(range(count)))
            return self.runner.left("hand", sets.plan, count)
        except RunnerFailure as failure:
            where = f"{sets.cases[0].label()}: {failure.message}"
            raise self._failed(failure, "runs", where) from failure

    def repeats(self, declared: bool) -> None:
        """Call with equal inputs at two addresses, and once more: bits must be equal."""
        differ = self._differing(rounds=1)
        allowed = declared and not self.op.contract.guards.deterministic
        if differ and not allowed:
            detail = f"equal inputs gave other bits at {differ[0]}"
            raise Wrong(Outcome.MISMATCH, "determinism", detail)
        said = "declared otherwise" if differ else "equal bits thrice"
        self.state.check("determinism", True, said)

    def _differing(self, rounds: int) -> list[str]:
        """Points, the smallest and the largest, at which equal inputs gave different bits."""
        scalars = self.op.served_scalars
        differ = []
        for point in (self.sweep.points()[0], self.sweep.points()[-1]):
            sets = self._made([Case(point, "normal", self.draw.seed(), scalars)] * ALIKE)
            blocks = [block for _ in range(rounds) for block in self._called(sets).blocks]
            differ += [point.label() for block in blocks[1:] if (block != blocks[0]).any()]
        return differ

    def timed(
        self,
        baseline: Runner,
        clocks: ClockMonitor,
        report: Progress,
        apart: DeviceCode | None = None,
    ) -> dict[str, Any]:
        settings, device = self.settings, self.state.device
        precision = Precision(
            fewest_pairs=min(settings.pairs, FEWEST_PAIRS),
            most_pairs=settings.pairs,
            half_width=settings.precision_pct / 100,
        )
        session = TimingSession(
            self.op,
            device,
            self.runner,
            baseline,
            self.draw,
            self.stock,
            clocks,
            settings.threads,
            precision,
            apart,
        )
        timings: list[Timing] = []
        points = self.sweep.points()
        for index, point in enumerate(points):
            report("time", index, len(points))
            with self._timed_at(point.label()):
                timings.append(session.compare(point, settings.load_timeout_s))
        if device == "cuda":
            with self._timed_at("behind another kernel"):
                self.followed = session.followed(points, settings.load_timeout_s)
            with self._timed_at("under CUPTI"):
                seen = session.traced(points, settings.load_timeout_s)
            self.traced = seen.said
            self.state.tripwires += tuple(
                f"library: {share:.0f} % of its time on the GPU is {name}'s, by CUPTI"
                for name, share in seen.libraries.items()
            )
        report("time", len(points), len(points))
        self.calls = self.timed_calls = session.calls
        self.graded = "" if apart is None else apart.said
        return {
            **({} if apart is None else {"grade": apart.grade, "grade_reason": apart.reason}),
            "timings": tuple(timings),
            "timing_method": session.method,
            "environment": describe(device, settings.threads, clocks.description),
        }

    @contextmanager
    def _timed_at(self, where: str) -> Iterator[None]:
        try:
            yield
        except WrongCall as found:
            timed = found.check == "timed outputs"
            broken = Outcome.MISMATCH if timed else Outcome.GUARD_VIOLATION
            raise Wrong(broken, found.check, f"{where}: {found.detail}") from found
        except RunnerFailure as failure:
            detail = f"{where}: {failure.message}"
            on_gpu = self.state.device == "cuda"
            if on_gpu and re.search("[Cc]aptur|ChildGraph", failure.message):
                # engines replay graphs, so a kernel that cannot be captured there fails
                wrong = Outcome.GUARD_VIOLATION
                raise Wrong(wrong, "capture", detail, _log(failure, self.runner)) from failure
            raise self._failed(failure, "timed calls", detail) from failure

    def soaked(self) -> None:
        """Make more checked calls until their number and duration suffice."""
        op, enough = self.op, soaked_calls(self.op, self.sweep, self.settings.calls)
        until = self.begin + self.settings.lives_s
        for point in itertools.cycle(self.sweep.points()):
            if self.calls >= enough and time.monotonic() >= until:
                return
            count = soaked_sets(cases_.tensors_of(op, point))
            sets = self._made(fresh(op, point, count, self.draw))
            if problem := sets.problem(self._called(sets)):
                raise _wrong(problem, "values after", f"{point.label()} after {self.calls} calls")
            self.calls += count

    def sanitized(self, built: Built, report: Progress) -> None:
        """On CUDA devices: run compute-sanitizer in separate processes."""
        if self.state.device != "cuda":
            self.state.check("sanitizer", True, "not for the CPU: compute-sanitizer is for CUDA")
            return
        report("sanitize", 0, 1)
        settings = self.settings
        said = sanitize(
            self.op,
            self.state.candidate,
            built,
            self.sweep,
            self.state.device,
            self.draw,
            limit_s=settings.load_timeout_s,
            memory_bytes=settings.memory_bytes,
        )
        report("sanitize", 1, 1)
        self.believed(said)

    def believed(self, said: Sanitized) -> None:
        """If reports were set aside, repeat calls on equal inputs more often instead."""
        if said.outcome is not None:
            raise Wrong(said.outcome, "sanitizer", said.detail, said.log)
        detail = said.detail
        if said.set_aside:
            if differ := self._differing(LONGER):
                detail = f"races were reported, and equal inputs gave other bits at {differ[0]}"
                raise Wrong(Outcome.GUARD_VIOLATION, "sanitizer", detail, said.log)
            detail += f"; instead, equal bits in {LONGER * ALIKE} calls at each of two sizes"
        self.state.check("sanitizer", True, detail)

    def passed(self) -> None:
        discriminates = self.rejected > self.planted // 2
        if not discriminates:
            raise VerificationError(
                f"the checks of {self.op.name} do not tell a planted low-precision version from a "
                f"right one ({self.rejected} of {self.planted} rejected): the verdict is void",
                "fix the op's `control`, or its accuracy baseline",
            )
        planted = f"a planted low-precision version failed at {self.rejected} of {self.planted}"
        self.state.check("control", True, planted)
        self.state.check("runs", True, f"{self.compared} calls in a process of their own")
        guards = "red zones whole, read-only tensors and buffers of calls never made unchanged"
        self.state.check("guards", True, guards)
        least = self.op.accuracy_name
        values = f"{self.compared} seeded cases against float64, by the error of {least}"
        self.state.check("values", True, values)
        lived = time.monotonic() - self.begin
        after = f"right to the last of {self.calls} calls, {lived:.1f} s after it was loaded"
        self.state.check("values after", True, after)
        timed = f"the outputs of all {self.timed_calls} timed calls, each on values of its own"
        self.state.check("timed outputs", True, timed)
        if self.graded:
            self.state.check("device code", True, self.graded)
        if self.followed:
            self.state.check("stream order", True, self.followed)
        runners = "" if self.state.device == "cpu" else "the runner's clock, "
        clocks = f"{runners}the judge's, calls by themselves and the machine's floor agree"
        self.state.check("clocks", True, "; ".join(filter(None, (clocks, self.traced))))

    def _failed(self, failure: RunnerFailure, check: str, detail: str) -> Wrong:
        forged = isinstance(failure, ForgedReplyError)
        outcome = Outcome.GUARD_VIOLATION if forged else Outcome.RUNTIME_ERROR
        return Wrong(outcome, "channel" if forged else check, detail, _log(failure, self.runner))


def _wrong(problem: tuple[str, str], values: str, where: str) -> Wrong:
    """Check a call with `cases.problem`; `values` names the check that wrong values fail."""
    check, detail = problem
    if check == "guards":
        return Wrong(Outcome.GUARD_VIOLATION, "guards", f"{where}: {detail}")
    return Wrong(Outcome.MISMATCH, values, f"{where}: {detail}")


def _log(failure: RunnerFailure, runner: Runner) -> str:
    return "\n".join(part for part in (failure.trace or failure.message, runner.log_tail()) if part)
