"""Best stock configuration first: a flag's win must never be booked as a kernel's.

One option after another is tried on top of the best so far, each way in a process of its own, in
short windows; the ways of one option may load side by side, stock beside those of the first: on an
H200 a vLLM that has the GPU to itself takes 0.19 ms longer for a step than one beside idle ones.
What does not start, or is not faster by more than windows differ, is not taken. What else the
machine does differs from trial to trial: what was found has to beat stock once more, side by side
where both can be loaded.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from pydantic import JsonValue

from patcher.bench.ab.engine_config import ConfigTrial, OtherWorkloadRate, Tuning, overriding, words
from patcher.bench.ab.phases import ABPhase, ABProgress, silent
from patcher.bench.ab.processes import SHARE_BESIDE, EngineProcess, TooLateError, open_all
from patcher.bench.ab.windows import Pair, Side, prompt_seed, take_pair
from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe
from patcher.bench.stats.comparison import Arm
from patcher.bench.workload import Shape, Workload

WINDOWS = 5
"""Of a trial; the first is left out."""
STEPS = 64

EXCEPTION = re.compile(r"((\([^)]*\)|\[rank\d+\]:) )*[\w.]*(Error|Exception)\b")
"""How a line begins that names one; vLLM puts the process in front, PyTorch the rank."""

Arguments = Mapping[str, JsonValue]
StartStock = Callable[[Arguments, float], EngineProcess]
"""Starts stock with these arguments and such a share of the device's memory."""
Rate = Callable[[EngineProcess, Arguments], ConfigTrial]
"""How fast a loaded process is."""


def options_of(engine: str) -> Sequence[Sequence[Arguments]]:
    """The options that matter, each with the ways that are tried beside stock.

    Raises:
        UsageError: the engine has none.
    """
    from patcher.bench.engines import ENGINES

    options: Sequence[Sequence[Arguments]] = getattr(ENGINES.load(engine), "options", ())
    if options:
        return options
    raise UsageError(f"{engine} has no options to tune here", "leave out --tune-baseline")


def tune(
    start: StartStock,
    workload: Workload,
    options: Sequence[Sequence[Arguments]],
    clocks: ClockMonitor,
    *,
    wanted: Arguments | None = None,
    other_workloads: Sequence[Shape] = (),
    seed: int = 0,
    stagger_s: float | None = None,
    progress: ABProgress = silent,
    tried_one: Callable[[ConfigTrial], None] | None = None,
) -> Tuning:
    """Find the fastest stock configuration.

    Args:
        wanted: what patches will want the engine told. Where that is not what was found, it is
            tried at the end, too: their gain must not be such a flag's.
        other_workloads: other traffic at which each is timed, too; nothing is chosen by that.
        stagger_s: from one start to the next, where the ways of an option can load side by side;
            one that fails there is tried again beside stock alone, since it may be for want of
            memory, but not one that took too long. None: each alone.
        tried_one: told of each trial when it is over.

    Raises:
        PatcherError: stock itself does not run.
    """
    told = tried_one or (lambda trial: None)
    total = 1 + sum(map(len, options)) + 2 + bool(wanted)
    short = workload.model_copy(update={"output_len": min(workload.output_len, STEPS)})
    rate = partial(_rate, workload=short, other_workloads=other_workloads, clocks=clocks, seed=seed)
    trials: list[ConfigTrial] = []

    def all_of(tried: Mapping[str, Arguments]) -> list[ConfigTrial]:
        stage = f"tune the baseline ({'; '.join(tried)})"
        progress(ABPhase.TUNE, stage, len(trials), total)
        begun = len(trials)
        found, failed = ({}, {}) if stagger_s is None else _beside(start, rate, tried, stagger_s)
        two_fit = stagger_s if len(found) > 1 else None
        for name, arguments in tried.items():
            if name in found:
                trial = found[name]
            elif isinstance(late := failed.get(name), TooLateError):
                trial = _failed(arguments, late)
            else:
                trial = _once_more(start, rate, arguments, two_fit)
            trials.append(trial)
            told(trial)
            progress(ABPhase.TUNE, stage, len(trials), total)
        return trials[begun:]

    best: ConfigTrial | None = None
    for ways in options:
        known = {} if best is None else best.arguments
        tried = {words(way): {**known, **way} for way in ways}
        if best is None:  # stock beside the first of them, since it is faster beside others
            best, *others = all_of({words({}): {}, **tried})
            if best.tokens_per_s is None:
                raise PatcherError(f"stock does not run: {best.failure}")
        else:
            others = all_of(tried)
        for trial in others:
            if trial.beats(best):
                best = trial
    assert best is not None, "an engine with options has one at least"
    if best.arguments:
        last = {words({}): {}, words(best.arguments): best.arguments}
        if other := overriding(wanted or {}, best.arguments):
            both = {**best.arguments, **other}
            last[words(both)] = both
        best, *others = all_of(last)
        for trial in others:
            if trial.beats(best):
                best = trial
    progress(ABPhase.TUNE, "tune the baseline", total, total)
    return Tuning(
        trials=tuple(trials),
        chosen=best.arguments,
        workload=workload,
        environment=describe(workload.device, workload.threads, clocks.description),
    )


def _beside(
    start: StartStock,
    rate: Rate,
    tried: Mapping[str, Arguments],
    stagger_s: float,
    rated: Sequence[str] | None = None,
) -> tuple[dict[str, ConfigTrial], dict[str, PatcherError]]:
    """Trials of those that load and run while the others are there, and why the others do not.

    Args:
        rated: which of them; None: all.
    """
    share = 2 * SHARE_BESIDE / max(2, len(tried))
    found: dict[str, ConfigTrial] = {}
    failed: dict[str, PatcherError] = {}

    def loaded(name: str) -> EngineProcess | None:
        try:
            return start(tried[name], share)
        except PatcherError as error:
            failed[name] = error
            return None

    opened = open_all(list(tried), loaded, stagger_s)
    with ExitStack() as stack:
        there = {
            name: stack.enter_context(closing(process))
            for name, process in opened.items()
            if process is not None
        }
        for name, process in there.items():
            if rated is None or name in rated:
                try:
                    found[name] = rate(process, tried[name])
                except PatcherError as error:
                    failed[name] = error
    return found, failed


def _once_more(
    start: StartStock, rate: Rate, arguments: Arguments, stagger_s: float | None
) -> ConfigTrial:
    """One that did not load among many, or not yet: beside stock where two fit (`stagger_s`), as
    the others were beside others, else alone as they were."""
    if stagger_s is not None:
        two = {"stock": {}, "again": arguments}
        found, failed = _beside(start, rate, two, stagger_s, ["again"])
        return found["again"] if found else _failed(arguments, failed["again"])
    try:
        with closing(start(arguments, SHARE_BESIDE)) as process:
            return rate(process, arguments)
    except PatcherError as error:
        return _failed(arguments, error)


def _failed(arguments: Arguments, error: PatcherError) -> ConfigTrial:
    late = isinstance(error, TooLateError)
    failure = "it took too long to load" if late else _last_line(error.message)
    return ConfigTrial(arguments=dict(arguments), tokens_per_s=None, failure=failure)


def _rate(
    process: EngineProcess,
    arguments: Arguments,
    workload: Workload,
    other_workloads: Sequence[Shape],
    clocks: ClockMonitor,
    seed: int,
) -> ConfigTrial:
    process.warm_up(prompt_seed(seed, -1), workload.output_len)

    def rates(side: Side, traffic: Workload) -> list[float]:
        windows = []
        for number in range(WINDOWS):
            pair = Pair(number, "aa", ("baseline", "patched"))
            sides: dict[Arm, Side] = {"baseline": side}
            windows += take_pair(pair, sides, traffic, process.vocab_size, seed, clocks)
        return [window.tokens_per_s for window in windows[1:]]

    found = rates(process.side(), workload)
    others = [rates(process.side(shape), shape.of(workload)) for shape in other_workloads]
    return ConfigTrial(
        arguments=dict(arguments),
        tokens_per_s=statistics.median(found),
        spread_pct=_spread_pct(found),
        other_workloads=tuple(
            OtherWorkloadRate(
                batch=shape.batch,
                context=shape.context,
                tokens_per_s=statistics.median(each),
                spread_pct=_spread_pct(each),
            )
            for shape, each in zip(other_workloads, others, strict=True)
        ),
    )


def _spread_pct(rates: Sequence[float]) -> float:
    return 100 * (max(rates) / min(rates) - 1)


def _last_line(message: str) -> str:
    """Of a process's last words: the exception, without the traceback and its folders."""
    lines = message.strip().splitlines() or ["no reason given"]
    named = [line for line in lines if EXCEPTION.match(line)]  # warnings may follow it
    return (named or lines)[-1].strip()[:300]
