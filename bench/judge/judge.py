"""The verdict on one candidate, step by step: build, load, correctness, baselines, time."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.candidate import Candidate
from bench.clocks import ClockMonitor
from bench.environment import describe
from bench.errors import MissingError, UsageError
from bench.evaluation import Check, Evaluation, Outcome, Timing, geomean
from bench.judge import JudgeSettings, Progress
from bench.judge import cases as cases_
from bench.judge.process import SANDBOX, Runner, RunnerFailure
from bench.op import Op, Sweep, load_op
from bench.timing import Sitting, strongest
from bench.toolchains import Built, build, toolchain


@dataclass
class _State:
    candidate: Candidate
    device: str
    begin: float = field(default_factory=time.monotonic)
    checks: list[Check] = field(default_factory=list)
    build: Built | None = None

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(name=name, passed=passed, detail=detail))

    def verdict(self, outcome: Outcome, log: str = "", **more: Any) -> Evaluation:
        return Evaluation(
            op=self.candidate.op,
            language=self.candidate.language,
            digest=self.candidate.digest,
            outcome=outcome,
            checks=tuple(self.checks),
            log=log,
            sandbox=SANDBOX,
            build_s=self.build.seconds if self.build else None,
            total_s=time.monotonic() - self.begin,
            **{"environment": describe(self.device), **more},
        )


def judge(candidate: Candidate, settings: JudgeSettings, report: Progress) -> Evaluation:
    """See `bench.judge.evaluate`."""
    op = load_op(candidate.op)
    device = _device(candidate, settings)
    sweep = op.sweep(device, settings.sweep)
    if settings.baseline and settings.baseline not in op.baselines:
        raise UsageError(
            f"{op.name} has no baseline {settings.baseline!r}", f"it has: {', '.join(op.baselines)}"
        )
    state = _State(candidate, device)

    if not re.search(rf"\b{re.escape(op.name)}\b", candidate.source):
        state.check("entry", False, f"the source defines no {op.name}")
        return state.verdict(
            Outcome.GENERATION_FAILURE, f"the source must define {op.contract.signature()}"
        )
    if reason := toolchain(candidate.language).missing():
        raise MissingError(
            f"cannot build {candidate.language} here: {reason}", "see `patcher doctor`"
        )
    report("build", 0, 1)
    state.build = built = build(candidate, op.contract)
    if not built.ok:
        state.check("build", False, f"{built.command} failed")
        return state.verdict(Outcome.COMPILATION_FAILURE, built.log)
    state.check(
        "build", True, f"{built.command} ({'cached' if built.cached else f'{built.seconds:.1f} s'})"
    )
    return _run(state, op, sweep, built, settings, report)


def _run(
    state: _State, op: Op, sweep: Sweep, built: Built, settings: JudgeSettings, report: Progress
) -> Evaluation:
    written = [tensor.name for tensor in op.contract.written]
    with ExitStack() as stack:
        runner = stack.enter_context(
            Runner(
                state.device, written, settings.threads, trusted=False, timeout_s=settings.timeout_s
            )
        )
        try:
            runner.command(
                "candidate",
                settings.load_timeout_s,
                built=built.model_dump(mode="json"),
                entry=op.name,
            )
        except RunnerFailure as failure:
            state.check("load", False, failure.message)
            return state.verdict(Outcome.RUNTIME_ERROR, _log(failure, runner))
        outcome, log = _correct(state, op, sweep, runner, settings, report)
        if outcome is not None:
            return state.verdict(outcome, log)

        report("baselines", 0, len(op.baselines))
        honest = stack.enter_context(
            Runner(state.device, written, settings.threads, trusted=True, timeout_s=300)
        )
        names = [settings.baseline] if settings.baseline else list(op.baselines)
        baselines, best = strongest(op, sweep, state.device, honest, names, report)
        clocks = stack.enter_context(ClockMonitor(state.device))
        sitting = Sitting(op, sweep, state.device, runner, honest, settings.pairs, clocks)
        timings: list[Timing] = []
        points = sweep.points()
        for index, point in enumerate(points):
            report("time", index, len(points))
            try:
                timing, problem = sitting.compare(point, load_timeout_s=settings.load_timeout_s)
            except RunnerFailure as failure:
                state.check("timed calls", False, f"{point.label()}: {failure.message}")
                captured = sitting.captured_by_baseline and "apture" in failure.message
                outcome = Outcome.GUARD_VIOLATION if captured else Outcome.RUNTIME_ERROR
                return state.verdict(
                    outcome, _log(failure, runner), baseline=best, baselines=baselines
                )
            if problem is not None:
                name, detail = problem
                state.check(name, False, f"{point.label()}: {detail}")
                broken = Outcome.GUARD_VIOLATION if name == "guards" else Outcome.MISMATCH
                return state.verdict(broken, baseline=best, baselines=baselines)
            timings.append(timing)
        report("time", len(points), len(points))
        calls = sum(timing.calls for timing in timings)
        state.check(
            "timed outputs",
            True,
            f"the outputs of all {calls} timed calls, each on values of its own",
        )
        speedup = geomean([timing.speedup for timing in timings])
        return state.verdict(
            Outcome.CORRECT if speedup > 1 else Outcome.TOO_SLOW,
            baseline=best,
            baselines=baselines,
            timings=tuple(timings),
            timing_method=sitting.method,
            geomean_speedup=speedup,
            environment=describe(state.device, settings.threads, clocks.description),
        )


def _correct(
    state: _State, op: Op, sweep: Sweep, runner: Runner, settings: JudgeSettings, report: Progress
) -> tuple[Outcome | None, str]:
    """Every case against float64; the first thing wrong decides."""
    todo = cases_.correctness_cases(op, sweep)
    compiles_late = state.candidate.language in ("triton", "torch")
    planted, rejected = 0, 0
    for index, case in enumerate(todo):
        report("check", index, len(todo))
        inputs = cases_.make_inputs(op, case)
        expected = cases_.expect(op, case, inputs)
        plan = cases_.tensors_of(op, case.point)
        cases_.send(runner, plan, [inputs])
        try:
            limit = settings.load_timeout_s if compiles_late else None
            runner.command(
                "run", limit, layout=plan.model_dump(), scalars=list(case.scalars), sets=1
            )
            got = cases_.receive(runner, plan, 1)[0]
        except RunnerFailure as failure:
            state.check("runs", False, f"{case.label()}: {failure.message}")
            return Outcome.RUNTIME_ERROR, _log(failure, runner)
        if problem := cases_.guard_problem(op, inputs, got):
            state.check("guards", False, f"{case.label()}: {problem}")
            return Outcome.GUARD_VIOLATION, ""
        if problem := cases_.value_problem(op, case, expected, got.values):
            state.check("values", False, f"{case.label()}: {problem}")
            return Outcome.MISMATCH, ""
        if case.regime == "normal" and case.point in sweep.points():
            control = op.control(**inputs, **cases_.scalars_by_name(op, case))
            planted += 1
            rejected += cases_.value_problem(op, case, expected, control) is not None
    discriminates = rejected > planted // 2
    state.check(
        "control",
        discriminates,
        f"a planted low-precision version failed at {rejected} of {planted} swept points",
    )
    if not discriminates:
        return (
            Outcome.MISMATCH,
            "the check does not discriminate here, so nothing can be said: the verdict is void",
        )
    state.check("runs", True, f"{len(todo)} calls in a process of their own")
    state.check("guards", True, "red zones whole, read-only tensors unchanged")
    state.check(
        "values",
        True,
        f"{len(todo)} seeded cases against float64, by the error of {op.honest_baseline}",
    )
    report("check", len(todo), len(todo))
    return None, ""


def _device(candidate: Candidate, settings: JudgeSettings) -> str:
    import torch

    native = {"cpp": "cpu", "cuda": "cuda", "triton": "cuda"}.get(candidate.language)
    device = settings.device or native or ("cuda" if torch.cuda.is_available() else "cpu")
    if native and device != native:
        raise UsageError(
            f"a {candidate.language} candidate runs on {native}, not {device}", "drop --device"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            f"a {candidate.language} candidate needs a CUDA device and this machine has none",
            "evaluate it on a GPU host; a cpp candidate runs here",
        )
    return device


def _log(failure: RunnerFailure, runner: Runner) -> str:
    return "\n".join(part for part in (failure.trace or failure.message, runner.log_tail()) if part)
