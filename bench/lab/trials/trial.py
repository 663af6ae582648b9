"""Trials: many verdicts from few engine starts, and their summary.

A *trial* is one verdict as of `patcher throughput`, from windows that no other trial shares. Each
trial draws at least three process pairs from the loaded processes. No process is in two pairs, and
which process of a pair is the baseline is drawn, too. Each process pair runs a warm-up pair and a
few pairs of windows over new prompts. The processes are the same in all trials. A process that
differs from the others affects every trial that draws it, so that trials are not independent, as
those of freshly started processes would be.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Comparison, Record, Window, Workload
from patcher.bench.ab.processes import EngineProcess
from patcher.bench.ab.throughput import decide_on
from patcher.bench.ab.windows import Pair, abba, take_pair
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.compare import MIN_PROCESS_PAIRS, without_order
from patcher.bench.stats.comparison import Arm

Kind = Literal["aa", "planted", "patch"]
PAIRS_OF_TRIAL = 1000
"""Range of pair numbers per trial, so that no two trials share prompts."""


class Resident(EngineProcess, Protocol):
    """A process that stays loaded between trials."""

    def delay(self, seconds: float) -> None:
        """Make each decode step take `seconds` longer from now on."""
        ...


class VerdictTrial(Record):
    """One verdict and its windows."""

    schema_version: int = SCHEMA_VERSION
    number: int
    kind: Kind
    process_pairs: tuple[tuple[int, int], ...]
    """Numbers of the baseline and the patched process of each process pair."""
    start: int
    """Number of the start of all processes."""
    batch: int = Field(ge=1)
    delay_s: float = 0.0
    """Planted delay in seconds of each decode step of the baseline."""
    comparison: Comparison | None
    """The verdict; None if no pair was usable."""
    windows: tuple[Window, ...]
    seconds: float

    @property
    def planted_pct(self) -> float:
        """The planted gain in percent, relative to the windows without the delay."""
        steps = [one.step_s(self.batch) for one in self.windows if one.arm == "patched"]
        return 100 * self.delay_s / statistics.median(steps)


class Repeats(Record):
    """Repetitions of one window in one process, without the first."""

    schema_version: int = SCHEMA_VERSION
    process: int
    start: int
    tokens_per_s: tuple[float, ...] = Field(min_length=2)
    step_s: float
    """Median seconds of a decode step of the whole batch."""
    seconds: float

    @property
    def cv_pct(self) -> float:
        return 100 * statistics.stdev(self.tokens_per_s) / statistics.mean(self.tokens_per_s)


class Setting(NamedTuple):
    """Common options of a folder's trials."""

    workload: Workload
    pairs: int
    """Pairs per process pair, without the warm-up pair."""
    margin_pct: float
    seed: int


def draw(
    rng: random.Random, processes: int, patched: int = 0, count: int = MIN_PROCESS_PAIRS
) -> tuple[tuple[int, int], ...]:
    """Draw process pairs (baseline, patched) that share no process.

    Args:
        rng: source of randomness.
        processes: number of processes.
        patched: number of patched processes, which come last. If 0, all processes are identical,
            and the roles within a pair are drawn.
        count: number of process pairs.
    """
    stock = list(range(processes - patched))
    rng.shuffle(stock)
    if patched == 0:
        return tuple((stock[2 * index], stock[2 * index + 1]) for index in range(count))
    other = list(range(processes - patched, processes))
    rng.shuffle(other)
    return tuple(zip(stock[:count], other[:count], strict=True))


def take_windows(
    setting: Setting,
    number: int,
    drawn: Sequence[tuple[int, int]],
    processes: Sequence[Resident],
    clocks: ClockMonitor,
    delay_s: float = 0.0,
) -> tuple[Window, ...]:
    """Run the windows of one trial. A delay applies to the baseline's steps during the trial."""
    windows: list[Window] = []
    rng = random.Random(f"{setting.seed}:{number}")
    for place, (first, second) in enumerate(drawn):
        baseline, patched = processes[first], processes[second]
        if delay_s:
            baseline.delay(delay_s)
        try:
            orders = [o for _ in range(setting.pairs) for o in abba(rng)][: setting.pairs + 1]
            for index, order in enumerate(orders):
                pair = Pair(
                    PAIRS_OF_TRIAL * (number + 1) + place * (setting.pairs + 1) + index,
                    "ab",
                    order,
                    place,
                    first > second,
                )
                windows += take_pair(
                    pair,
                    {"baseline": baseline.side(), "patched": patched.side()},
                    setting.workload,
                    baseline.vocab_size,
                    setting.seed,
                    clocks,
                )
        finally:
            if delay_s:
                baseline.delay(0)
    return tuple(windows)


def verdict_on(setting: Setting, windows: Sequence[Window]) -> Comparison | None:
    """Apply the rule of `patcher throughput`; None if no pair is usable."""
    return decide_on(list(windows), "ab", setting.margin_pct, 95.0)


def take_repeats(
    setting: Setting, process: Resident, repeats: int, steps: int, clocks: ClockMonitor
) -> tuple[tuple[float, ...], float]:
    """Repeat a window over the same prompts.

    Args:
        setting: workload and seed.
        process: the process to run in.
        repeats: number of windows after the first one, which is left out.
        steps: decode steps per window.
        clocks: clock monitor.

    Returns:
        Tokens per second of each window, and the median seconds of a decode step.
    """
    workload = setting.workload.model_copy(update={"output_len": steps})
    pair = Pair(0, "aa", ("baseline", "patched"))
    windows = [
        window
        for _ in range(repeats + 1)
        for window in take_pair(
            pair,
            {"baseline": process.side()},
            workload,
            process.vocab_size,
            setting.seed,
            clocks,
        )
    ][1:]
    step_s = statistics.median(one.step_s(workload.batch) for one in windows)
    return tuple(one.tokens_per_s for one in windows), step_s


class Kinds(Record):
    """Summary of the trials of one kind."""

    trials: int
    verdicts: dict[str, int]
    unusable: int
    """Trials without a usable pair."""
    gain_mean_pct: float | None
    gain_sd_pct: float | None
    gain_range_pct: tuple[float, float] | None
    half_width_pct: float | None
    """Half-width of the 95 % interval, median over trials."""
    process_pair_sd_pct: float | None
    """Standard deviation of the mean gain of a process pair, mostly differences of processes."""
    pair_sd_pct: float | None
    """Standard deviation of a pair's log-ratio, median over trials."""
    order_effect_pct: float | None
    """Percent by which the first window of a pair is faster, median over trials."""
    turn_sd_ms: float | None
    """Standard deviation of the difference between both windows of a pair in a turn, which covers
    the same steps of both. Warm-up pairs are left out."""
    pair_sd_by_turns_pct: float | None
    """Standard deviation of pairs if the turns were independent and the only source of noise."""
    planted_pct: float | None
    """Planted gain relative to the speed without the delay, median over trials."""
    covered: int
    """Number of trials whose interval contains the true gain."""


class TrialsSummary(Record):
    """Summary of the trials of a folder."""

    schema_version: int = SCHEMA_VERSION
    kinds: dict[Kind, Kinds]
    false_accept_limit_pct: float | None
    """Upper 95 % limit of the false accept rate if the trials were independent."""
    repeats: int
    """Smallest number of repeats of a process."""
    cv_within_pct: float | None
    """Coefficient of variation within a process, median over processes."""
    cv_within_max_pct: float | None
    """Coefficient of variation within a process, the largest."""
    cv_between_pct: float | None
    """Coefficient of variation of the processes' means, over the same prompts."""
    tokens_per_s: float | None
    starts: int


def summarise(trials: Sequence[VerdictTrial], repeats: Sequence[Repeats]) -> TrialsSummary:
    """Summarise all trials and repeats until now."""
    by_kind: dict[Kind, list[VerdictTrial]] = {}
    for trial in trials:
        by_kind.setdefault(trial.kind, []).append(trial)
    kinds: dict[Kind, Kinds] = {}
    for kind, own in by_kind.items():
        kinds[kind] = _kind(own)
    aa = kinds.get("aa")
    limit = None
    if aa is not None and aa.trials and not aa.verdicts.get("accept"):
        limit = 100 * (1 - 0.05 ** (1 / aa.trials))
    within = [one.cv_pct for one in repeats]
    means = [statistics.mean(one.tokens_per_s) for one in repeats]
    return TrialsSummary(
        kinds=kinds,
        false_accept_limit_pct=limit,
        repeats=min((len(one.tokens_per_s) for one in repeats), default=0),
        cv_within_pct=statistics.median(within) if within else None,
        cv_within_max_pct=max(within, default=None),
        cv_between_pct=(
            100 * statistics.stdev(means) / statistics.mean(means) if len(means) > 1 else None
        ),
        tokens_per_s=statistics.median(means) if means else None,
        starts=len({one.start for one in trials} | {one.start for one in repeats}),
    )


def _kind(trials: Sequence[VerdictTrial]) -> Kinds:
    comparisons = [trial.comparison for trial in trials if trial.comparison is not None]
    gains = [one.gain_pct for one in comparisons]
    planted = [trial.planted_pct for trial in trials if trial.delay_s]
    pairs = [gain for trial in trials for gain in _by_process_pair(trial)]
    centre = statistics.mean(pairs) if pairs else 0.0
    turn_sd_ms, by_turns_pct = _turns(trials)
    covered = 0
    for trial in trials:
        truth = trial.planted_pct if trial.delay_s else 0.0
        one = trial.comparison
        covered += one is not None and one.gain_low_pct <= truth <= one.gain_high_pct
    return Kinds(
        trials=len(comparisons),
        verdicts=_counts([one.verdict for one in comparisons]),
        unusable=len(trials) - len(comparisons),
        gain_mean_pct=statistics.mean(gains) if gains else None,
        gain_sd_pct=statistics.stdev(gains) if len(gains) > 1 else None,
        gain_range_pct=(min(gains), max(gains)) if gains else None,
        half_width_pct=_median([(one.gain_high_pct - one.gain_low_pct) / 2 for one in comparisons]),
        process_pair_sd_pct=statistics.stdev(pairs, centre) if len(pairs) > 1 else None,
        pair_sd_pct=_median([one.pair_sd_pct for one in comparisons]),
        order_effect_pct=_median(
            [one.order_effect_pct for one in comparisons if one.order_effect_pct is not None]
        ),
        turn_sd_ms=turn_sd_ms,
        pair_sd_by_turns_pct=by_turns_pct,
        planted_pct=_median(planted),
        covered=covered,
    )


def _turns(trials: Sequence[VerdictTrial]) -> tuple[float | None, float | None]:
    """`Kinds.turn_sd_ms` and `Kinds.pair_sd_by_turns_pct`; None if turns were not recorded."""
    pairs = [both for trial in trials for own in _timed_pairs(trial) for both in own]
    # per order, since the order effect is not spread
    by_order: dict[bool, list[list[float]]] = {}
    for both in pairs:
        apart = [
            first - second
            for first, second in zip(both["patched"].turns_s, both["baseline"].turns_s, strict=True)
        ]
        by_order.setdefault(_patched_first(both), []).append(apart)
    orders = [times for times in by_order.values() if len(times) > 1]
    if not orders or not orders[0][0]:
        return None, None
    spare = sum(len(times) - 1 for times in orders)
    variances = [
        sum((len(turn) - 1) * statistics.variance(turn) for turn in turns) / spare
        for turns in zip(*(zip(*times, strict=True) for times in orders), strict=True)
    ]
    window_s = statistics.median(one.decode_s for both in pairs for one in both.values())
    pair_pct = 100 * math.sqrt(sum(variances)) / window_s
    return 1e3 * math.sqrt(statistics.mean(variances)), pair_pct


def _by_process_pair(trial: VerdictTrial) -> list[float]:
    """Mean gain of each process pair in percent, without the order effect."""
    pairs = [(owner, both) for owner, own in enumerate(_timed_pairs(trial)) for both in own]
    owners = [owner for owner, _ in pairs]
    ratios = [_log_ratio(both) for _, both in pairs]
    if not ratios:
        return []
    ratios = without_order(ratios, [_patched_first(both) for _, both in pairs], owners).ratios
    by_owner: dict[int, list[float]] = {}
    for owner, ratio in zip(owners, ratios, strict=True):
        by_owner.setdefault(owner, []).append(ratio)
    return [100 * math.expm1(statistics.mean(own)) for own in by_owner.values()]


def _timed_pairs(trial: VerdictTrial) -> list[list[dict[Arm, Window]]]:
    """Pairs of each process pair without its warm-up pair; the arm that ran first comes first."""
    by_process: dict[int | None, dict[int, dict[Arm, Window]]] = {}
    for window in trial.windows:
        by_process.setdefault(window.process, {}).setdefault(window.pair, {})[window.arm] = window
    return [list(pairs.values())[1:] for pairs in by_process.values()]


def _patched_first(arms: Mapping[Arm, Window]) -> bool:
    return next(iter(arms)) == "patched"


def _log_ratio(arms: Mapping[Arm, Window]) -> float:
    return math.log(arms["patched"].tokens_per_s / arms["baseline"].tokens_per_s)


def _counts(verdicts: Sequence[str]) -> dict[str, int]:
    return {word: verdicts.count(word) for word in ("accept", "inconclusive", "reject")}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
