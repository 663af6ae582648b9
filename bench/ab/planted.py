"""Planted gains: does an end-to-end A/B on this machine find a known gain?

One arm has a calibrated delay in every decode step. The other arm then has a gain of known size and
sign. The measurement does not know about the delay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from patcher.bench.ab.phases import ABPhase, ABProgress, silent
from patcher.bench.ab.records import Throughput
from patcher.bench.ab.throughput import compare_in_one_process
from patcher.bench.ab.windows import Arms
from patcher.bench.engines import Engine
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Arm, Comparison
from patcher.bench.stats.intervals import pairs_needed
from patcher.bench.workload import Workload

GAINS_PCT = (1.0, 0.5, -1.0)

StepDelay = Callable[[float], AbstractContextManager[object]]
"""A context in which each decode step of the engine takes so many seconds longer."""


class Planted(Record):
    """One planted gain, and the measured result."""

    asked_pct: float
    planted_pct: float
    """Actual gain of the delay in percent, by the speed of windows without it."""
    delay_us: float
    """Delay of a decode step."""
    found: Literal["found", "not found", "wrong"]
    """`not found`: inconclusive with so few pairs; `wrong`: the opposite verdict."""
    holds: bool
    """Whether the interval contains the planted gain; one in twenty at 95 % does not."""
    pairs_needed: int | None
    """Pairs for a gain of this size against this margin, at the measured spread; None at the margin
    itself."""
    comparison: Comparison
    control: Comparison | None


class PlantedGains(Record):
    """The planted gains, each measured in a separate session."""

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    planted: tuple[Planted, ...]
    clocks: str

    @property
    def wrong(self) -> bool:
        return any(one.found == "wrong" for one in self.planted)

    @property
    def all_found(self) -> bool:
        return all(one.found == "found" for one in self.planted)


def plant(
    engine: Engine,
    delayed: StepDelay,
    workload: Workload,
    *,
    margin_pct: float,
    max_pairs: int,
    looks: int,
    clocks: ClockMonitor,
    gains_pct: tuple[float, ...] = GAINS_PCT,
    seed: int = 0,
    progress: ABProgress = silent,
) -> PlantedGains:
    """Plant each gain in a separate session and measure it.

    A gain above the margin must be accepted against that margin. Smaller gains and losses are
    measured against a margin of zero, where a gain must be accepted and a loss rejected.

    Raises:
        UsageError, PatcherError: as `patcher.bench.ab.throughput.compare_in_one_process`.
    """
    step_s = step_seconds(engine, seed)
    found = []
    for number, gain in enumerate(gains_pct):
        delay_s = step_s * (gain / 100 if gain > 0 else 1 / (1 + gain / 100) - 1)
        slow: Arm = "baseline" if gain > 0 else "patched"
        measured = compare_in_one_process(
            engine,
            _arms(delayed, delay_s, slow),
            workload,
            margin_pct=margin_pct if gain > margin_pct else 0.0,
            max_pairs=max_pairs,
            looks=looks,
            patch_id=None,
            clocks=clocks,
            seed=seed + number + 1,
            progress=partial(_named, progress, gain),
        )
        found.append(_outcome(measured, gain, delay_s, slow))
    return PlantedGains(workload=workload, planted=tuple(found), clocks=clocks.description)


def _named(
    progress: ABProgress, gain: float, phase: ABPhase, said: str, done: int, total: int
) -> None:
    progress(phase, f"planted {gain:+g} %: {said}", done, total)


def _arms(delayed: StepDelay, delay_s: float, slow: Arm) -> Arms:
    quick: Arm = "patched" if slow == "baseline" else "baseline"
    return {slow: lambda: delayed(delay_s), quick: nullcontext}


def _outcome(measured: Throughput, gain: float, delay_s: float, slow: Arm) -> Planted:
    comparison = measured.comparison
    step_s = statistics.median(
        window.step_s(measured.workload.batch)
        for window in measured.windows
        if window.kind == "ab" and window.arm != slow
    )
    ratio = 1 + delay_s / step_s
    planted = 100 * (ratio - 1 if gain > 0 else 1 / ratio - 1)
    expected, opposite = ("accept", "reject") if gain > 0 else ("reject", "accept")
    says: Literal["found", "not found", "wrong"] = "not found"
    if comparison.verdict == expected:
        says = "found"
    elif comparison.verdict == opposite:
        says = "wrong"
    return Planted(
        asked_pct=gain,
        planted_pct=planted,
        delay_us=1e6 * delay_s,
        found=says,
        holds=comparison.gain_low_pct <= planted <= comparison.gain_high_pct,
        pairs_needed=pairs_needed(comparison.pair_sd_pct, planted, comparison.margin_pct),
        comparison=comparison,
        control=measured.control,
    )


def step_seconds(engine: Engine, seed: int) -> float:
    """Seconds of one decode step: the median of a few windows after the first one."""
    steps = engine.workload.output_len
    windows = [engine.generate(engine.prompts(seed + index), steps) for index in range(6)]
    return statistics.median(window.decode_s / steps for window in windows[1:])


def runner_delay(runner: Any) -> StepDelay:
    """Delay each step of vLLM. It enqueues the next step before it waits for one, so a delay of the
    host would be hidden behind the GPU. So the GPU itself spins before each step, also with
    graphs.

    Args:
        runner: either of vLLM's model runners; both have `execute_model`, called once a step.
    """

    @contextmanager
    def delayed(seconds: float) -> Iterator[None]:
        cycles = round(seconds * spin_cycles_per_s())
        original = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:  # else nothing runs but the end of requests
                _spin(cycles)
            return original(scheduled, *args, **kwargs)

        runner.execute_model = execute_model
        try:
            yield
        finally:
            del runner.execute_model

    return delayed


def spin_cycles_per_s(cycles: int = 20_000_000, repeats: int = 5) -> float:
    """Counts per second of a spinning GPU, without launch time."""
    event: Any = torch.cuda.Event
    seconds: list[float] = []
    for _ in range(repeats + 1):
        marks = [event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        _spin(cycles)
        marks[1].record()
        _spin(2 * cycles)
        marks[2].record()
        marks[2].synchronize()
        seconds.append((marks[1].elapsed_time(marks[2]) - marks[0].elapsed_time(marks[1])) / 1e3)
    return cycles / statistics.median(seconds[1:])


def _spin(cycles: int) -> None:
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def model_delay(model: torch.nn.Module) -> StepDelay:
    """Delay an engine that calls `model` on the host once per decode step and waits for it. The
    host spins before each call. If the GPU were busy meanwhile, the delay would be hidden.
    """

    @contextmanager
    def delayed(seconds: float) -> Iterator[None]:
        def spin(_module: torch.nn.Module, _args: Any) -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass

        handle = model.register_forward_pre_hook(spin)
        try:
            yield
        finally:
            handle.remove()

    return delayed
