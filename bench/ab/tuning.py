"""Find the best stock configuration, so that a flag's gain is not booked as a kernel's.

One option after another is tried on top of the best so far, each value in a separate process, in
short windows. The values of one option may load side by side, stock beside those of the first: on
an H200, a vLLM alone on the GPU takes 0.19 ms longer per step than one beside idle ones. A value
that does not start, or is not faster by more than the spread of windows, is not chosen. Other load
on the machine varies from trial to trial, so the result must beat stock once more, side by side if
both fit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from pydantic import JsonValue

from patcher.bench.ab.engine_config import ConfigTrial, OtherWorkloadRate, Tuning, overriding, words
from patcher.bench.ab.phases import ABPhase, ABProgress, silent
from patcher.bench.ab.processes import SHARE_BESIDE, EngineProcess, TooLateError, open_all
from patcher.bench.ab.windows import Pair, Side, prompt_seed, take_pair
from patcher.bench.engines.child_errors import EndedError, last_error
from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe
from patcher.bench.stats.comparison import Arm
from patcher.bench.workload import Shape, Workload

WINDOWS = 5
"""Windows of a trial; the first is left out."""
STEPS = 64

Arguments = Mapping[str, JsonValue]
Options = Sequence[Sequence[Arguments]]
"""The engine's options, each with its values."""
StartStock = Callable[[Arguments, float], EngineProcess]
"""Starts stock with these arguments and a share of the device's memory."""
TryAll = Callable[[Mapping[str, Arguments]], list[ConfigTrial]]
Rate = Callable[[EngineProcess, Arguments], ConfigTrial]
"""Measures the speed of a loaded process."""


def options_of(engine: str) -> Options | Callable[[Workload], Options]:
    """The engine's options, each with the values to try besides stock, or what lists them.

    Raises:
        UsageError: the engine has none.
    """
    from patcher.bench.engines import ENGINES

    options: Options | Callable[[Workload], Options] = getattr(ENGINES.load(engine), "options", ())
    if options:
        return options
    raise UsageError(f"{engine} has no options to tune here", "choose another --engine: vllm")


def options_for(workload: Workload) -> Options:
    """The options of the workload's engine, with the values to try for its model on this machine.

    Raises:
        UsageError: the engine has none.
        PatcherError: the engine does not list them.
    """
    options = options_of(workload.engine)
    return options(workload) if callable(options) else options


def chosen_options(options: Options, names: Sequence[str]) -> Options:
    """Those of the options whose argument is named; all if none is.

    Raises:
        UsageError: there is no option with that name.
    """
    known = {next(iter(ways[0])): ways for ways in options}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--switch {unknown[0]}: not tried here", f"choose of {', '.join(known)}")
    return [ways for name, ways in known.items() if name in names or not names]


def tune(
    start: StartStock,
    workload: Workload,
    options: Options,
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
        wanted: arguments that patches need. If they differ from the result, they are tried at the
            end, too, since their gain must not be due to such a flag.
        other_workloads: other traffic at which each is timed, too; the choice does not depend on
            it.
        stagger_s: seconds between starts, if the values of an option can load side by side. One
            that fails is tried again beside stock alone, since memory may have been short, unless
            it took too long. None: each runs alone.
        tried_one: called with each finished trial.

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
                trial = failed_trial(arguments, late)
            else:
                trial = _once_more(start, rate, arguments, two_fit)
            trials.append(trial)
            told(trial)
            progress(ABPhase.TUNE, stage, len(trials), total)
        return trials[begun:]

    best = search(all_of, options, wanted)
    progress(ABPhase.TUNE, "tune the baseline", total, total)
    return Tuning(
        trials=tuple(trials),
        chosen=best.arguments,
        workload=workload,
        environment=describe(workload.device, workload.threads, clocks.description),
    )


def search(try_all: TryAll, options: Options, wanted: Arguments | None = None) -> ConfigTrial:
    """The fastest configuration: one option after another on top of the best so far, then that and
    stock once more.

    Args:
        try_all: tries these configurations, which have names, under the same conditions.
        wanted: as of `tune`.

    Raises:
        PatcherError: stock itself does not run.
    """
    best: ConfigTrial | None = None
    for ways in options:
        known = {} if best is None else best.arguments
        tried = {words(way): {**known, **way} for way in ways}
        if best is None:  # stock beside the first of them, since it is faster beside others
            best, *others = try_all({words({}): {}, **tried})
            if best.tokens_per_s is None:
                raise PatcherError(f"stock does not run: {best.failure}")
        else:
            others = try_all(tried)
        for trial in others:
            if trial.beats(best):
                best = trial
    assert best is not None, "an engine with options has at least one"
    if best.arguments:
        last = {words({}): {}, words(best.arguments): best.arguments}
        if other := overriding(wanted or {}, best.arguments):
            both = {**best.arguments, **other}
            last[words(both)] = both
        best, *others = try_all(last)
        for trial in others:
            if trial.beats(best):
                best = trial
    return best


def _beside(
    start: StartStock,
    rate: Rate,
    tried: Mapping[str, Arguments],
    stagger_s: float,
    rated: Sequence[str] | None = None,
) -> tuple[dict[str, ConfigTrial], dict[str, PatcherError]]:
    """Trials of the configurations that load and run side by side, and why the others failed.

    Args:
        rated: which of them to time; None: all.
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
    """Retry a configuration that did not load among many, or try a new one: beside stock if two fit
    (`stagger_s`), else alone, under the same conditions as the others.
    """
    if stagger_s is not None:
        two = {"stock": {}, "again": arguments}
        found, failed = _beside(start, rate, two, stagger_s, ["again"])
        return found["again"] if found else failed_trial(arguments, failed["again"])
    try:
        with closing(start(arguments, SHARE_BESIDE)) as process:
            return rate(process, arguments)
    except PatcherError as error:
        return failed_trial(arguments, error)


def failed_trial(arguments: Arguments, error: PatcherError) -> ConfigTrial:
    """A configuration that did not run, with the engine's own reason."""
    if isinstance(error, TooLateError):
        failure = "it took too long to load"
    elif isinstance(error, EndedError):
        failure = error.said
    else:
        failure = last_error(error.message.encode()) or "no reason given"
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
        spread_pct=spread_pct(found),
        other_workloads=tuple(
            OtherWorkloadRate(
                batch=shape.batch,
                context=shape.context,
                tokens_per_s=statistics.median(each),
                spread_pct=spread_pct(each),
            )
            for shape, each in zip(other_workloads, others, strict=True)
        ),
    )


def spread_pct(rates: Sequence[float]) -> float:
    return 100 * (max(rates) / min(rates) - 1)
