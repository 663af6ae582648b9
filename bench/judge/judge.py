"""Evaluate a candidate in steps: build, load, correctness, timing, correctness again."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch

from patcher.bench.errors import MissingError, UsageError, VerificationError
from patcher.bench.judge import JudgeSettings, Progress, Stopwatch
from patcher.bench.judge import cases as cases_
from patcher.bench.judge.baselines import LOAD_S, Strongest, strongest
from patcher.bench.judge.building import begin, compile_check
from patcher.bench.judge.cases import Case, Secrets, reseeded
from patcher.bench.judge.device_code import DeviceCode
from patcher.bench.judge.engine_cases import recorded_cases, told
from patcher.bench.judge.evaluation import BaselineTime, Evaluation, Outcome, geomean
from patcher.bench.judge.planning import require_fits
from patcher.bench.judge.process import Runner
from patcher.bench.judge.regimes import require_seeded
from patcher.bench.judge.reloading import load_again
from patcher.bench.judge.trial import AFTER, Trial, TrialState, Wrong
from patcher.bench.judge.tripwires import Tripwires
from patcher.bench.judge.zygote import Limits, RunnerFailure, Zygote
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.ops.candidate import Candidate
from patcher.bench.ops.contract import Sweep
from patcher.bench.ops.op import Op, load_op
from patcher.bench.sandbox import process_tree as tree
from patcher.bench.toolchains import Built, build, cache_root, toolchain

CANARY_PAUSE_S = 3.0
"""Seconds between attempts: a killed process releases its GPU memory with a delay."""


class Judge:
    """A context manager that evaluates candidates one after another.

    It keeps the processes of the baselines alive between candidates.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self._zygotes: dict[str, Zygote] = {}
        self._trusted: dict[str, Runner] = {}
        self._canary: dict[str, str] = {}
        self._idle_us = math.inf
        """CUDA: microseconds of a copy before any candidate ran."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # the judge's own arithmetic must not compete for CPUs with the timed processes
        before = torch.get_num_threads()
        self._stack.callback(torch.set_num_threads, before)
        torch.set_num_threads(1)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def build_ahead(self, candidates: Sequence[Candidate]) -> None:
        """Compile candidates in parallel, before the device is locked.

        Builds are cached by content, so that `evaluate` reuses them.
        """
        before = tree.descendants(os.getpid())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            builds = [
                pool.submit(build, candidate, load_op(candidate.op).contract)
                for candidate in {each.digest: each for each in candidates}.values()
                if toolchain(candidate.language).missing() is None
            ]
            try:
                for one in builds:
                    one.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(one.done() for one in builds):  # their threads wait for compilers
                    tree.kill_all(tree.descendants(os.getpid()) - before)
                    time.sleep(0.01)
                raise

    def evaluate(
        self, candidate: Candidate, report: Progress, seed: int | None = None
    ) -> Evaluation:
        """Evaluate one candidate; see `patcher.bench.judge.evaluate`.

        Args:
            candidate: the source, its language and its op.
            report: called with (stage, done, total).
            seed: makes the compared outputs reproducible bit by bit. None: seeds are secret, as a
                verdict requires.
        """
        watch = Stopwatch("load")

        def timed(stage: str, done: int, total: int) -> None:
            watch.turn(stage)
            report(stage, done, total)

        found = self._evaluate(candidate, timed, seed)
        phases = {stage: round(seconds, 2) for stage, seconds in watch.taken_s().items()}
        return found.model_copy(update={"phases_s": phases})

    def _evaluate(self, candidate: Candidate, report: Progress, seed: int | None) -> Evaluation:
        settings = self.settings
        op = load_op(candidate.op)
        if candidate.language.compile_only:
            return compile_check(candidate, op, settings, report)
        device = _device(candidate, settings)
        sweep = _sweep(op, device, settings)
        if settings.baseline not in (None, "honest", *op.baselines):
            known = ", ".join(op.baselines)
            raise UsageError(f"{op.name} has no baseline {settings.baseline!r}", f"it has: {known}")
        require_fits(op, sweep, device)
        require_seeded(op, cases_.shapes_tried(op, sweep), device)
        recorded: tuple[list[Case], str] = ([], "")
        if settings.recorded is not None:
            recording, calls = recorded_cases(op, settings.recorded, device)
            recorded = calls, told(recording, calls)
        state = TrialState(candidate, device, outputs=None if seed is None else hashlib.sha256())
        start = begin(state, op, settings, report)
        if isinstance(start, Evaluation):
            return start
        with _device_lock(device):
            draw = Secrets(seed)
            return self._run(state, op, sweep, start.built, start.seen, report, draw, recorded)

    def _run(
        self,
        state: TrialState,
        op: Op,
        sweep: Sweep,
        built: Built,
        seen: Tripwires,
        report: Progress,
        draw: Secrets,
        recorded: tuple[list[Case], str],
    ) -> Evaluation:
        settings = self._settings(state.device)
        zygote = self._zygote(state.device)
        limits = Limits(reply_s=settings.timeout_s, memory_bytes=settings.memory_bytes)
        more: dict[str, Any] = {}
        with Runner(zygote, limits, trusted=False) as runner, ExitStack() as stack:
            apart = None
            if settings.device_code and state.device == "cuda":
                apart = stack.enter_context(DeviceCode(zygote, limits, runner, self._idle_us))
            trial = Trial(state, op, sweep, runner, settings, draw)
            try:
                trial.load(built, self._cpus(state.device))
                cases = cases_.correctness_cases(op, sweep, draw, 1 + seen.evidence)
                trial.correct(cases, report)
                if recorded[0]:
                    trial.correct(recorded[0], report, "recorded")
                trial.repeats(seen.declares_nondeterminism)
                load_again(trial, [*cases, *recorded[0]], report)
                baseline, times, name = self._baseline(op, sweep, state.device, report)
                more = {"baseline": name, "baselines": times, "sweep": sweep.name}
                with ClockMonitor(state.device) as clocks:
                    more |= trial.timed(baseline, clocks, report, apart)
                trial.soaked()
                again = draw.random.sample(cases, min(AFTER, len(cases)))
                trial.correct([reseeded(case, draw) for case in again], report, "values after")
                if settings.sanitize:
                    trial.sanitized(built, report)
            except torch.OutOfMemoryError as error:
                state.check("memory", False, _hoard(op, runner, error))
                evaluation = state.verdict(Outcome.RUNTIME_ERROR, runner.log_tail())
            except Wrong as wrong:
                before = trial.compared + trial.calls
                note = f"; {before} calls before it were right" if before else ""
                state.check(wrong.check, False, wrong.detail + note)
                timed = {key: more[key] for key in ("baseline", "baselines") if key in more}
                evaluation = state.verdict(wrong.outcome, wrong.log, **timed)
            else:
                trial.passed()
                if recorded[0]:
                    state.check("recorded", True, recorded[1])
                speedup = geomean([timing.speedup for timing in more["timings"]])
                outcome = Outcome.CORRECT if speedup > 1 else Outcome.TOO_SLOW
                evaluation = state.verdict(outcome, geomean_speedup=speedup, **more)
        if state.device == "cuda" and evaluation.outcome is Outcome.RUNTIME_ERROR:
            self._verify_device(state.device)
        return evaluation

    def _zygote(self, device: str) -> Zygote:
        if device not in self._zygotes:
            modules = ("triton",) if device == "cuda" else ()
            self._zygotes[device] = self._stack.enter_context(Zygote(device, modules))
            if device == "cuda":
                self._canary[device] = self._canary_digest(device)
        return self._zygotes[device]

    def _settings(self, device: str) -> JudgeSettings:
        """The settings, with one thread on a CPU unless `threads` is set.

        Several threads wait for each other, for milliseconds each time, as soon as another program
        runs.
        """
        if device == "cpu" and self.settings.threads is None:
            return replace(self.settings, threads=1)
        return self.settings

    def _baseline(
        self, op: Op, sweep: Sweep, device: str, report: Progress
    ) -> tuple[Runner, dict[str, BaselineTime], str]:
        """The runner with the baseline loaded, the times of all baselines, and its name."""
        runner, settings = self._trusted.get(device), self._settings(device)
        if runner is None or not runner.alive:
            limits = Limits(reply_s=300.0)
            runner = self._stack.enter_context(Runner(self._zygote(device), limits, trusted=True))
            runner.start(settings.threads, self._cpus(device))
            self._trusted[device] = runner
        name = op.accuracy_baseline if settings.baseline == "honest" else settings.baseline
        best = Strongest(name=name or "", times_us={}, missing={})
        try:
            if name is None:
                best = strongest(op, sweep, device, runner, settings.threads, report)
                name = best.name
            runner.command("baseline", LOAD_S, op=op.name, name=name)
        except RunnerFailure as failure:
            raise MissingError(
                f"baseline {name or 'of ' + op.name} does not run here: {failure.message}",
                "choose another one with --baseline, or see `patcher doctor`",
            ) from failure
        return runner, best.all(), name

    def _cpus(self, device: str) -> list[int] | None:
        """CPUs to which the runners of both arms are pinned; None: no pinning."""
        threads = self._settings(device).threads
        if device == "cuda" or threads is None:
            return None
        return sorted(os.sched_getaffinity(0))[:threads]

    def _canary_digest(self, device: str) -> str:
        """Digest of exact arithmetic on the device, computed in a fresh process."""
        with Runner(self._zygotes[device], Limits(reply_s=120.0), trusted=True) as runner:
            runner.start()
            digest = str(runner.command("canary")["digest"])
            if device == "cuda" and self.settings.device_code:
                times = runner.command("idle")["times_ns"]
                self._idle_us = min(self._idle_us, statistics.median(times) / 1e3)
            return digest

    def _verify_device(self, device: str) -> None:
        """Check that the device still computes correctly after a candidate failed."""
        for last in (False, False, True):
            try:
                digest = self._canary_digest(device)
            except (RunnerFailure, MissingError) as failure:
                if not last:
                    time.sleep(CANARY_PAUSE_S)
                    continue
                raise MissingError(
                    f"the GPU does not answer after a candidate failed: {failure.message}",
                    "reset it (nvidia-smi --gpu-reset), free its memory, or use another GPU",
                ) from failure
        if digest != self._canary[device]:
            raise VerificationError(
                "the GPU computes wrong values after a candidate failed",
                "reset it (nvidia-smi --gpu-reset)",
            )


def _hoard(op: Op, runner: Runner, error: torch.OutOfMemoryError) -> str:
    """What a candidate held of a full GPU; raises `MissingError` if that was little."""
    before = torch.cuda.mem_get_info()[0]
    runner.kill()
    time.sleep(CANARY_PAUSE_S)
    free, whole = torch.cuda.mem_get_info()
    if (held := free - before) > whole / 2:
        return f"held {held / whole:.0%} of the GPU's memory, and left none to check it"
    raise MissingError(
        f"only {free / whole:.0%} of the GPU's memory is free, too little to judge {op.name}",
        "end other programs on it, or choose a sweep with smaller sizes",
    ) from error


@contextmanager
def _device_lock(device: str) -> Iterator[None]:
    """Let one judge of this user use the GPUs at a time. Builds do not need the lock."""
    if device != "cuda":
        yield
        return
    # a host's GPUs are judged on side by side
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    path = cache_root() / f"gpu-{re.sub(r'[^A-Za-z0-9-]', '_', first)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(op: Op, device: str, settings: JudgeSettings) -> Sweep:
    sweep = op.sweep(device, settings.sweep)
    if settings.points is None:
        return sweep
    last, count = len(sweep.values) - 1, min(settings.points, len(sweep.values))
    chosen = {last - round(index * last / max(count - 1, 1)) for index in range(count)}
    return sweep.model_copy(update={"values": tuple(sweep.values[i] for i in sorted(chosen))})


def _device(candidate: Candidate, settings: JudgeSettings) -> str:
    native = candidate.language.traits.device
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
