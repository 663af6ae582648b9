"""Best stock configuration first: a flag's win must never be booked as a kernel's.

One option after another is tried on top of the best so far, each way in a process of its own, in
short windows. What does not start, or is not faster by more than windows differ, is not taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from bench.clocks import ClockMonitor
from bench.comparison import Arm, Trial, Tuning
from bench.errors import PatcherError, UsageError
from bench.process_pairs import ArmProcess
from bench.windows import Pair, Side, prompt_seed, take_pair
from bench.workload import Workload

WINDOWS = 5
"""Of a trial; the first is left out."""
STEPS = 64
LEAST_GAIN_PCT = 0.5
"""Trials come one after another: what is smaller may be drift."""

Arguments = Mapping[str, JsonValue]
Start = Callable[[Arguments], ArmProcess]


def options_of(engine: str) -> Sequence[Sequence[Arguments]]:
    """The options that matter, each with the ways that are tried beside stock.

    Raises:
        UsageError: the engine has none.
    """
    if engine == "vllm":
        from bench.engines.vllm import OPTIONS

        return OPTIONS
    raise UsageError(f"{engine} has no options to tune here", "leave out --tune-baseline")


def tune(
    start: Start,
    workload: Workload,
    options: Sequence[Sequence[Arguments]],
    clocks: ClockMonitor,
    *,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Tuning:
    """Find the fastest stock configuration.

    Raises:
        PatcherError: stock itself does not run.
    """
    report = progress or (lambda stage, done, total: None)
    total = 1 + sum(map(len, options))
    short = workload.model_copy(update={"output_len": min(workload.output_len, STEPS)})
    report("tune the baseline (stock)", 0, total)
    best = _rate(start, {}, short, clocks, seed)
    trials = [best]
    for ways in options:
        base = best
        for way in ways:
            arguments = {**base.arguments, **way}
            report(f"tune the baseline ({_words(way)})", len(trials), total)
            try:
                trial = _rate(start, arguments, short, clocks, seed)
            except PatcherError as error:
                trial = Trial(
                    arguments=arguments, tokens_per_s=None, failure=_last_line(error.message)
                )
            trials.append(trial)
            if _faster(trial, best):
                best = trial
    return Tuning(trials=tuple(trials), chosen=best.arguments)


def _rate(
    start: Start, arguments: Arguments, workload: Workload, clocks: ClockMonitor, seed: int
) -> Trial:
    process = start(arguments)
    try:
        process.warm_up(prompt_seed(seed, -1), workload.output_len)
        side = process.side()
        windows = []
        for number in range(WINDOWS):
            pair = Pair(number, "aa", ("baseline", "patched"))
            sides: dict[Arm, Side] = {"baseline": side}
            windows += take_pair(pair, sides, workload, process.vocab_size, seed, clocks)
    finally:
        process.close()
    rates = [window.tokens_per_s for window in windows[1:]]
    return Trial(
        arguments=dict(arguments),
        tokens_per_s=statistics.median(rates),
        spread_pct=100 * (max(rates) / min(rates) - 1),
    )


def _faster(trial: Trial, best: Trial) -> bool:
    if trial.tokens_per_s is None or best.tokens_per_s is None:
        return False
    gain = 100 * (trial.tokens_per_s / best.tokens_per_s - 1)
    return gain > max(LEAST_GAIN_PCT, trial.spread_pct or 0, best.spread_pct or 0)


def _words(way: Arguments) -> str:
    return ", ".join(f"{name}={value}" for name, value in way.items())


def _last_line(message: str) -> str:
    """Of a process's last words: the exception, without the traceback and its folders."""
    return message.strip().splitlines()[-1][:300] if message.strip() else "no reason given"
