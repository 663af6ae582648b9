"""One comparison: log-ratio per pair, an interval of its mean, a verdict against a margin.

What an arm gains by beginning a pair is found and taken out. The interval is one of Student's t
over pairs, blocks of pairs or process pairs, whichever is the widest (`stats.intervals`). Pairs far
from all others count as if they were less far, on either side alike, and are counted
(`stats.adjust`); and a sign test over all at their full distance must agree with an accept, so that
a few wild pairs can neither bring one about nor hide one. Looks are paid for by alpha spending (Lan
and DeMets 1983, with the O'Brien-Fleming-like function), so that looking early does not make a
false accept likelier; several patches by Holm's correction.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from patcher.bench.errors import UsageError
from patcher.bench.stats.adjust import winsorised, without_order
from patcher.bench.stats.comparison import Comparison, Sample, Verdict, Window
from patcher.bench.stats.intervals import (
    DEFAULT_PAIRS,
    DEFAULT_PROCESS_PAIRS,
    LOOKS,
    MIN_PAIRS,
    MIN_PROCESS_PAIRS,
    Mean,
    half_width,
    look_confidences,
    mean_of,
    pairs_needed,
    sign_needs,
)


def compare(
    samples: Iterable[Sample | Window],
    margin_pct: float = 0.5,
    confidence_pct: float = 95.0,
    warmup_pairs: int = 1,
    dropped_pairs: frozenset[int] = frozenset(),
) -> Comparison:
    """Compare patched with baseline.

    Args:
        samples: two per pair, one of each arm; pairs in the order they were taken, and of windows
            in a pair the one first that began (of plain samples that is not known, and nothing is
            made of it). Where they name their `process`, all of them do, and a pair's two name the
            same process pair.
        margin_pct: gain that the lower bound must exceed to accept.
        confidence_pct: level of the two-sided interval.
        warmup_pairs: first pairs left out, of each process pair.
        dropped_pairs: pairs left out because their clocks drifted or throttled.

    Raises:
        UsageError: a pair lacks an arm or has one twice, or its processes do not fit; there is no
            usable pair; or a margin or level that means nothing.
    """
    if not -100 < margin_pct < math.inf:
        raise UsageError(f"margin of {margin_pct:g} %", "a margin is a gain in percent, e.g. 0.5")
    if not 0 < confidence_pct < 100:
        raise UsageError(f"confidence of {confidence_pct:g} %", "it lies between 0 and 100")
    samples = list(samples)
    pairs = _pairs(samples)
    used = [p for p in _without_warmup(pairs, warmup_pairs) if p.number not in dropped_pairs]
    if not used:
        raise UsageError(
            f"no usable pair among {len(pairs)}", "give more pairs than the warm-up takes"
        )
    processes = [pair.process for pair in used if pair.process is not None]
    # a difference of logarithms, since a quotient can overflow
    ratios = [math.log(pair.patched) - math.log(pair.baseline) for pair in used]
    known = all(isinstance(sample, Window) for sample in samples)
    first = [pair.patched_first for pair in used] if known else None
    found = judge(ratios, margin_pct, confidence_pct, processes or None, first)
    return Comparison(
        pairs=len(used),
        dropped_pairs=len(pairs) - len(used),
        baseline_tokens_per_s=statistics.median(pair.baseline for pair in used),
        patched_tokens_per_s=statistics.median(pair.patched for pair in used),
        gain_pct=found.gain_pct,
        gain_low_pct=found.low_pct,
        gain_high_pct=found.high_pct,
        confidence_pct=confidence_pct,
        margin_pct=margin_pct,
        pair_sd_pct=found.pair_sd_pct,
        order_effect_pct=found.order_effect_pct,
        verdict=found.verdict,
        reason=found.reason + _process_note(used),
        process_pairs=len(set(processes)),
        block_pairs=found.block_pairs,
        outlying_pairs=found.outlying_pairs,
        p_value=found.p_value,
    )


class Judgement(NamedTuple):
    """What `judge` says of log-ratios; the fields are `Comparison`'s."""

    gain_pct: float
    low_pct: float
    high_pct: float
    pair_sd_pct: float
    order_effect_pct: float | None
    block_pairs: int
    outlying_pairs: int
    p_value: float
    verdict: Verdict
    reason: str


def judge(
    ratios: Sequence[float],
    margin_pct: float = 0.5,
    confidence_pct: float = 95.0,
    processes: Sequence[int] | None = None,
    patched_first: Sequence[bool] | None = None,
) -> Judgement:
    """The verdict on log-ratios of usable pairs in the order they were taken; at least one.

    Args:
        processes: the process pair of each.
        patched_first: of each, whether the patched arm began; what the order does is then taken
            out.
    """
    effect = None
    if patched_first is not None:
        ratios, effect = without_order(ratios, patched_first, processes)
    near, outlying = winsorised(ratios, processes)
    mean = mean_of(near, processes, ordered=effect is not None)
    half, spread = mean.widest(confidence_pct)
    low, high = _percent(mean.value - half), _percent(mean.value + half)
    verdict, reason = _verdict(ratios, mean, low, high, margin_pct)
    if outlying:
        words = "pair lies far out and counts" if outlying == 1 else "pairs lie far out and count"
        reason += f"; {outlying} {words} as if less far"
    return Judgement(
        gain_pct=_percent(mean.value),
        low_pct=low,
        high_pct=high,
        pair_sd_pct=100 * statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
        order_effect_pct=None if effect is None else _percent(effect),
        block_pairs=1 if spread is None else spread.block,
        outlying_pairs=outlying,
        p_value=mean.p_above(math.log1p(margin_pct / 100)),
        verdict=verdict,
        reason=reason,
    )


def _verdict(
    ratios: Sequence[float], mean: Mean, low: float, high: float, margin_pct: float
) -> tuple[Verdict, str]:
    if len(ratios) < MIN_PAIRS:
        return "inconclusive", f"{len(ratios)} usable pairs are too few: {MIN_PAIRS} at least"
    if low > margin_pct:
        above = sum(ratio > math.log1p(margin_pct / 100) for ratio in ratios)
        if above < sign_needs(len(ratios)):
            return (
                "inconclusive",
                f"the mean is above the margin, but only {above} of {len(ratios)} pairs are",
            )
        return "accept", f"the interval's lower end {low:+.2f} % is above the margin"
    if high < margin_pct:
        return "reject", f"the interval's upper end {high:+.2f} % is below the margin"
    holds = f"the interval holds the margin of {margin_pct:g} %"
    worst = max(mean.spreads)
    if worst.block == 0:
        return "inconclusive", f"{holds}; only more process pairs would tell"
    # as if independent, with the spread that the blocks show
    alike = 100 * worst.error * math.sqrt(len(ratios))
    needed = pairs_needed(alike, _percent(mean.value), margin_pct)
    return "inconclusive", holds + (f"; about {needed} pairs would tell" if needed else "")


def holm(comparisons: Sequence[Comparison], confidence_pct: float = 95.0) -> list[Comparison]:
    """The comparisons of all patches tried, in order, an accept kept only where it holds among all.

    Holm's step-down (Scand. J. Statist. 6, 65, 1979) on the one-sided p-values, so that the chance
    of any false accept among them stays below half of what `confidence_pct` leaves. A p-value of a
    look is first scaled by the share of alpha that its look had (a weighted Bonferroni over looks).

    Raises:
        UsageError: a comparison without a p-value, recorded before there was one.
    """
    scaled = []
    for one in comparisons:
        if one.p_value is None:
            raise UsageError("a comparison without a p-value", "compare its samples again")
        scaled.append(one.p_value * (100 - confidence_pct) / (100 - one.confidence_pct))
    alpha = (1 - confidence_pct / 100) / 2
    found = list(comparisons)
    reached = 0.0
    for rank, index in enumerate(sorted(range(len(scaled)), key=scaled.__getitem__)):
        reached = max(reached, min(scaled[index] * (len(scaled) - rank), 1.0))
        update: dict[str, object] = {"p_holm": reached}
        if found[index].verdict == "accept" and reached > alpha:
            update["verdict"] = "inconclusive"
            update["reason"] = (
                f"accepted alone, but not among {len(scaled)} patches: "
                f"Holm's p is {reached:.2g}, at most {alpha:.2g} may be"
            )
        found[index] = found[index].model_copy(update=update)
    return found


def read_samples(path: Path) -> list[Sample]:
    """Samples from JSONL, one `{"pair", "arm", "tokens_per_s"}` a line.

    Raises:
        UsageError: unreadable, empty, or a line that does not fit (named by its number).
    """
    hint = 'one JSON object a line: {"pair": 0, "arm": "baseline", "tokens_per_s": 1610.2}'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text", hint) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(Sample.model_validate(json.loads(line)))
        except (ValueError, RecursionError) as error:  # pydantic's and json's are ValueErrors
            raise UsageError(f"{path.name}, line {number}: not a sample", hint) from error
    if not found:
        raise UsageError(f"{path.name} holds no samples", hint)
    return found


class _Pair(NamedTuple):
    number: int
    baseline: float
    patched: float
    process: int | None
    swapped: bool | None
    patched_first: bool


def _pairs(samples: Iterable[Sample | Window]) -> list[_Pair]:
    """In order of first appearance."""
    arms: dict[int, dict[str, Sample | Window]] = {}
    for sample in samples:
        held = arms.setdefault(sample.pair, {})
        if sample.arm in held:
            raise UsageError(f"pair {sample.pair} has {sample.arm} twice", "number pairs apart")
        held[sample.arm] = sample
    found = []
    for number, held in arms.items():
        if len(held) != 2:
            [only] = held
            raise UsageError(f"pair {number} has only {only}", "give both arms of every pair")
        baseline, patched = held["baseline"], held["patched"]
        rates = baseline.tokens_per_s, patched.tokens_per_s
        where = baseline.process, baseline.swapped
        if where != (patched.process, patched.swapped):
            raise UsageError(
                f"pair {number} is of two process pairs", "a pair's two samples share their process"
            )
        found.append(_Pair(number, *rates, *where, next(iter(held)) == "patched"))
    for before, after in pairwise(found):
        if (before.process is None) != (after.process is None):
            raise UsageError(
                f"pairs {before.number} and {after.number}: only one names its process",
                "name the process of every pair, or of none",
            )
    return found


def _without_warmup(pairs: list[_Pair], warmup_pairs: int) -> list[_Pair]:
    """Without the first ones of each process pair."""
    seen: dict[int | None, int] = {}
    kept = []
    for pair in pairs:
        seen[pair.process] = seen.get(pair.process, 0) + 1
        if seen[pair.process] > warmup_pairs:
            kept.append(pair)
    return kept


def _process_note(used: list[_Pair]) -> str:
    """What the processes do not average out, in words."""
    count = len({pair.process for pair in used} - {None})
    if count == 0:
        return ""
    word = "process pair" if count == 1 else "process pairs"
    if count < MIN_PROCESS_PAIRS:
        return (
            f"; {count} {word}: what two processes differ by for as long as they live, "
            f"about 0.1 %, is not averaged out ({MIN_PROCESS_PAIRS} process pairs would)"
        )
    note = f"; over {count} {word}"
    if len({pair.swapped for pair in used}) == 1 and used[0].swapped is not None:
        note += ", arms never swapped: what the two places differ by is not averaged out"
    return note


def _percent(log_ratio: float) -> float:
    """Percent, within +-1e6: a number stays one in JSON."""
    return 100 * math.expm1(min(log_ratio, math.log1p(1e4)))


__all__: Sequence[str] = (
    "DEFAULT_PAIRS",
    "DEFAULT_PROCESS_PAIRS",
    "LOOKS",
    "MIN_PAIRS",
    "MIN_PROCESS_PAIRS",
    "compare",
    "half_width",
    "holm",
    "judge",
    "look_confidences",
    "pairs_needed",
    "read_samples",
    "without_order",
)
