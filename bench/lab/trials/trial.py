"""Many verdicts from few engine starts: what a trial is, and what many of them say.

A *trial* is one verdict as `patcher throughput` gives it, from windows that no other trial shares:
at least three process pairs, drawn anew for each trial from all processes, which stay loaded, no
process in two of them, which of two is the baseline drawn too; in each a warm-up pair and a few
pairs of windows over prompts of their own. What is not new in each trial is the processes: what one
of them differs by from the others comes again in every trial that draws it, so that trials are not
independent as those of freshly started processes would be.
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
from patcher.bench.ab.throughput import compare_windows
from patcher.bench.ab.windows import Pair, abba, take_pair
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.compare import MIN_PROCESS_PAIRS, without_order
from patcher.bench.stats.comparison import Arm

TrialKind = Literal["aa", "planted", "patch"]
PAIRS_OF_TRIAL = 1000
"""Numbers of pairs that a trial may use, so that no two trials share prompts."""


class Resident(EngineProcess, Protocol):
    """A process that stays loaded from trial to trial."""

    def delay(self, seconds: float) -> None:
        """Make each of its decode steps take so much longer from now on."""
        ...


class VerdictTrial(Record):
    """One verdict, and what it was made of."""

    schema_version: int = SCHEMA_VERSION
    number: int
    kind: TrialKind
    process_pairs: tuple[tuple[int, int], ...]
    """Baseline and patched process of each, by number."""
    start: int
    """Which start of all processes they are of."""
    batch: int = Field(ge=1)
    delay_s: float = 0.0
    """Of each decode step of the baseline: what was planted."""
    comparison: Comparison | None
    """None: no pair could be used."""
    windows: tuple[Window, ...]
    seconds: float

    @property
    def planted_pct(self) -> float:
        """The planted gain by the speed of the windows without the delay."""
        steps = [one.step_s(self.batch) for one in self.windows if one.arm == "patched"]
        return 100 * self.delay_s / statistics.median(steps)


class Repeats(Record):
    """The same window again and again in one process, the first left out."""

    schema_version: int = SCHEMA_VERSION
    process: int
    start: int
    tokens_per_s: tuple[float, ...] = Field(min_length=2)
    step_s: float
    """Median of a decode step of the whole batch."""
    seconds: float

    @property
    def cv_pct(self) -> float:
        return 100 * statistics.stdev(self.tokens_per_s) / statistics.mean(self.tokens_per_s)


class Setting(NamedTuple):
    """What all trials of a folder have in common."""

    workload: Workload
    pairs: int
    """Of each process pair, without the warm-up pair."""
    margin_pct: float
    seed: int


def draw(
    rng: random.Random, processes: int, patched: int = 0, count: int = MIN_PROCESS_PAIRS
) -> tuple[tuple[int, int], ...]:
    """Process pairs (baseline, patched), none of them sharing a process.

    Args:
        patched: so many of the processes, the last, have a patch in and are no baseline; 0: all
            are the same program, and which of a pair is which is drawn.
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
    """The windows of one trial; a delay is in the baseline's steps and out again at the end."""
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
    """By the rule of `patcher throughput`; None where no pair is usable."""
    return compare_windows(list(windows), "ab", setting.margin_pct, 95.0)


def take_repeats(
    setting: Setting, process: Resident, repeats: int, steps: int, clocks: ClockMonitor
) -> tuple[tuple[float, ...], float]:
    """Tokens per second of a window over the same prompts, and the median decode step, in seconds.

    Args:
        steps: of a window.
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


class KindSummary(Record):
    """Trials of one kind."""

    trials: int
    verdicts: dict[str, int]
    unusable: int
    """Trials without a usable pair."""
    gain_mean_pct: float | None
    gain_sd_pct: float | None
    gain_range_pct: tuple[float, float] | None
    half_width_pct: float | None
    """Median over trials, of the 95 % interval."""
    process_pair_sd_pct: float | None
    """Of the mean gain of one process pair: what two processes differ by, mostly."""
    pair_sd_pct: float | None
    """Median over trials."""
    order_effect_pct: float | None
    """By how much the window that begins a pair is the faster one; median over trials."""
    turn_sd_ms: float | None
    """Of what both windows of a pair differ by in a turn, which is the same steps of both; warm-up
    pairs left out."""
    pair_sd_by_turns_pct: float | None
    """What pairs would differ by, were that all, and another in each turn."""
    planted_pct: float | None
    """Median over trials, by the speed without the delay."""
    covered: int
    """Trials whose interval holds the truth: nothing, or what was planted."""


class TrialsSummary(Record):
    """What the trials of a folder say."""

    schema_version: int = SCHEMA_VERSION
    kinds: dict[TrialKind, KindSummary]
    false_accept_limit_pct: float | None
    """Upper 95 % limit of the rate of false accepts, had the trials been independent."""
    repeats: int
    cv_within_pct: float | None
    """Median over processes."""
    cv_within_max_pct: float | None
    cv_between_pct: float | None
    """Of the processes' means, over the same prompts."""
    tokens_per_s: float | None
    starts: int


def summarise(trials: Sequence[VerdictTrial], repeats: Sequence[Repeats]) -> TrialsSummary:
    """Of all that was taken until now."""
    by_kind: dict[TrialKind, list[VerdictTrial]] = {}
    for trial in trials:
        by_kind.setdefault(trial.kind, []).append(trial)
    kinds: dict[TrialKind, KindSummary] = {}
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


def _kind(trials: Sequence[VerdictTrial]) -> KindSummary:
    found = [trial.comparison for trial in trials if trial.comparison is not None]
    gains = [one.gain_pct for one in found]
    planted = [trial.planted_pct for trial in trials if trial.delay_s]
    pairs = [gain for trial in trials for gain in _by_process_pair(trial)]
    centre = statistics.mean(pairs) if pairs else 0.0
    turn_sd_ms, by_turns_pct = _turns(trials)
    covered = 0
    for trial in trials:
        truth = trial.planted_pct if trial.delay_s else 0.0
        one = trial.comparison
        covered += one is not None and one.gain_low_pct <= truth <= one.gain_high_pct
    return KindSummary(
        trials=len(found),
        verdicts=_counts([one.verdict for one in found]),
        unusable=len(trials) - len(found),
        gain_mean_pct=statistics.mean(gains) if gains else None,
        gain_sd_pct=statistics.stdev(gains) if len(gains) > 1 else None,
        gain_range_pct=(min(gains), max(gains)) if gains else None,
        half_width_pct=_median([(one.gain_high_pct - one.gain_low_pct) / 2 for one in found]),
        process_pair_sd_pct=statistics.stdev(pairs, centre) if len(pairs) > 1 else None,
        pair_sd_pct=_median([one.pair_sd_pct for one in found]),
        order_effect_pct=_median(
            [one.order_effect_pct for one in found if one.order_effect_pct is not None]
        ),
        turn_sd_ms=turn_sd_ms,
        pair_sd_by_turns_pct=by_turns_pct,
        planted_pct=_median(planted),
        covered=covered,
    )


def _turns(trials: Sequence[VerdictTrial]) -> tuple[float | None, float | None]:
    """`turn_sd_ms` and `pair_sd_by_turns_pct` of `KindSummary`; Nones where turns were not kept."""
    pairs = [both for trial in trials for own in _timed_pairs(trial) for both in own]
    # of either order apart: what beginning a pair does is no spread
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
    """Gain of each process pair in percent, without the order effect."""
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
    """Of each process pair, without its warm-up pair; in a pair the arm first that began."""
    found: dict[int | None, dict[int, dict[Arm, Window]]] = {}
    for window in trial.windows:
        found.setdefault(window.process, {}).setdefault(window.pair, {})[window.arm] = window
    return [list(pairs.values())[1:] for pairs in found.values()]


def _patched_first(arms: Mapping[Arm, Window]) -> bool:
    return next(iter(arms)) == "patched"


def _log_ratio(arms: Mapping[Arm, Window]) -> float:
    return math.log(arms["patched"].tokens_per_s / arms["baseline"].tokens_per_s)


def _counts(verdicts: Sequence[str]) -> dict[str, int]:
    return {word: verdicts.count(word) for word in ("accept", "inconclusive", "reject")}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
