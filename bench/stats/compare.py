"""Compare two arms: log-ratio per pair, an interval of its mean, a verdict against a margin.

The order effect is estimated and removed, and outlier pairs are winsorised (`stats.adjust`). The
interval is Student's t over pairs, blocks of pairs or process pairs, whichever is widest
(`stats.intervals`). To accept, a sign test over the unclipped pairs must agree, so that a few
outliers can neither cause an accept nor hide one. Interim looks use alpha spending (Lan and DeMets
1983, with the O'Brien-Fleming-like function), so that looking early does not make a false accept
more likely. Several patches use Holm's correction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from patcher.bench.errors import UsageError
from patcher.bench.records import MOST_BYTES, parse_json, read_source
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
    """Compare the patched arm with the baseline.

    Args:
        samples: two samples per pair, one of each arm, with pairs in the order they were taken.
            The two windows of a pair come in the order they ran; the order of plain samples is
            unknown and not used. Either every sample names its `process` or none does, and the two
            samples of a pair name the same one.
        margin_pct: gain in percent that the lower bound must exceed to accept.
        confidence_pct: level of the two-sided interval in percent.
        warmup_pairs: number of leading pairs to leave out of each process pair.
        dropped_pairs: numbers of pairs to leave out because their clocks drifted or throttled.

    Returns:
        The gain in percent with its interval, and the verdict against the margin.

    Raises:
        UsageError: a pair lacks an arm, repeats one, or mixes process pairs; no usable pair is
            left; or the margin or the level is out of range.
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
            f"no usable pair among {len(pairs)}", "give more pairs than the warm-up leaves out"
        )
    processes = [pair.process for pair in used if pair.process is not None]
    # a difference of logarithms, since the quotient can overflow
    ratios = [math.log(pair.patched) - math.log(pair.baseline) for pair in used]
    known = all(isinstance(sample, Window) for sample in samples)
    first = [pair.patched_first for pair in used] if known else None
    judgement = judge(ratios, margin_pct, confidence_pct, processes or None, first)
    return Comparison(
        pairs=len(used),
        dropped_pairs=len(pairs) - len(used),
        baseline_tokens_per_s=statistics.median(pair.baseline for pair in used),
        patched_tokens_per_s=statistics.median(pair.patched for pair in used),
        gain_pct=judgement.gain_pct,
        gain_low_pct=judgement.low_pct,
        gain_high_pct=judgement.high_pct,
        confidence_pct=confidence_pct,
        margin_pct=margin_pct,
        pair_sd_pct=judgement.pair_sd_pct,
        order_effect_pct=judgement.order_effect_pct,
        verdict=judgement.verdict,
        reason=judgement.reason + _process_note(used),
        process_pairs=len(set(processes)),
        block_pairs=judgement.block_pairs,
        outlying_pairs=judgement.outlying_pairs,
        p_value=judgement.p_value,
    )


class Judgement(NamedTuple):
    """The result of `judge`; its fields are described at `Comparison`."""

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
    """Decide on the log-ratios of the usable pairs.

    Args:
        ratios: log-ratios of patched over baseline in the order they were taken; at least one.
        margin_pct: gain in percent that the lower bound must exceed to accept.
        confidence_pct: level of the two-sided interval in percent.
        processes: the process pair of each pair.
        patched_first: for each pair, whether the patched arm ran first. If given, the order effect
            is removed.
    """
    effect = None
    if patched_first is not None:
        ratios, effect = without_order(ratios, patched_first, processes)
    clipped, outlying = winsorised(ratios, processes)
    mean = mean_of(clipped, processes, ordered=effect is not None)
    half, spread = mean.widest(confidence_pct)
    low, high = _percent(mean.value - half), _percent(mean.value + half)
    verdict, reason = _verdict(ratios, mean, low, high, margin_pct)
    if outlying:
        words = "outlier pair was" if outlying == 1 else "outlier pairs were"
        reason += f"; {outlying} {words} winsorised"
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
    # the SD of independent pairs that would give the standard error of the blocks
    pair_sd_pct = 100 * worst.error * math.sqrt(len(ratios))
    needed = pairs_needed(pair_sd_pct, _percent(mean.value), margin_pct)
    return "inconclusive", holds + (f"; about {needed} pairs would tell" if needed else "")


def holm(comparisons: Sequence[Comparison], confidence_pct: float = 95.0) -> list[Comparison]:
    """Correct the comparisons of several patches for multiple testing.

    Applies Holm's step-down (Scand. J. Statist. 6, 65, 1979) to the one-sided p-values. The chance
    of any false accept stays below half of alpha, where alpha is 100 % minus `confidence_pct`. The
    p-value of an interim look is first scaled by that look's share of alpha (a weighted Bonferroni
    correction over looks).

    Args:
        comparisons: the comparisons of all patches that were tried.
        confidence_pct: confidence in percent of all comparisons together.

    Returns:
        The comparisons in the same order, with `p_holm`. An accept that does not survive the
        correction becomes inconclusive.

    Raises:
        UsageError: a comparison has no p-value, since it was recorded by an earlier version.
    """
    scaled = []
    for one in comparisons:
        if one.p_value is None:
            raise UsageError("a comparison without a p-value", "compare its samples again")
        scaled.append(one.p_value * (100 - confidence_pct) / (100 - one.confidence_pct))
    alpha = (1 - confidence_pct / 100) / 2
    corrected = list(comparisons)
    p_holm = 0.0
    for rank, index in enumerate(sorted(range(len(scaled)), key=scaled.__getitem__)):
        p_holm = max(p_holm, min(scaled[index] * (len(scaled) - rank), 1.0))
        update: dict[str, object] = {"p_holm": p_holm}
        if corrected[index].verdict == "accept" and p_holm > alpha:
            update["verdict"] = "inconclusive"
            update["reason"] = (
                f"accepted alone, but not among {len(scaled)} patches: "
                f"Holm's p is {p_holm:.2g}, at most {alpha:.2g} may be"
            )
        corrected[index] = corrected[index].model_copy(update=update)
    return corrected


def read_samples(path: Path) -> list[Sample]:
    """Read samples from a JSONL file, one `{"pair", "arm", "tokens_per_s"}` per line.

    Args:
        path: the JSONL file, in UTF-8. Blank lines are ignored.

    Returns:
        The samples in file order.

    Raises:
        UsageError: the file cannot be read, is empty, or has an invalid line (named by number).
    """
    hint = 'write one JSON object per line: {"pair": 0, "arm": "baseline", "tokens_per_s": 1610.2}'
    try:
        lines = read_source(path, MOST_BYTES).splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text", hint) from error
    samples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            samples.append(Sample.model_validate(parse_json(line)))
        except ValueError as error:  # pydantic's and json's are ValueErrors
            raise UsageError(f"{path.name}, line {number}: not a sample", hint) from error
    if not samples:
        raise UsageError(f"{path.name} holds no samples", hint)
    return samples


class _Pair(NamedTuple):
    number: int
    baseline: float
    patched: float
    process: int | None
    swapped: bool | None
    patched_first: bool


def _pairs(samples: Iterable[Sample | Window]) -> list[_Pair]:
    """Group samples into pairs, in order of first appearance."""
    by_pair: dict[int, dict[str, Sample | Window]] = {}
    for sample in samples:
        arms = by_pair.setdefault(sample.pair, {})
        if sample.arm in arms:
            raise UsageError(
                f"pair {sample.pair} has {sample.arm} twice", "give each pair its own number"
            )
        arms[sample.arm] = sample
    pairs = []
    for number, arms in by_pair.items():
        if len(arms) != 2:
            [only] = arms
            raise UsageError(f"pair {number} has only {only}", "give both arms of every pair")
        baseline, patched = arms["baseline"], arms["patched"]
        rates = baseline.tokens_per_s, patched.tokens_per_s
        where = baseline.process, baseline.swapped
        if where != (patched.process, patched.swapped):
            raise UsageError(
                f"the samples of pair {number} name two process pairs",
                "take both samples of a pair in the same process pair",
            )
        pairs.append(_Pair(number, *rates, *where, next(iter(arms)) == "patched"))
    for before, after in pairwise(pairs):
        if (before.process is None) != (after.process is None):
            raise UsageError(
                f"pairs {before.number} and {after.number}: only one names its process",
                "name the process of every pair, or of none",
            )
    return pairs


def _without_warmup(pairs: list[_Pair], warmup_pairs: int) -> list[_Pair]:
    """Leave out the first pairs of each process pair."""
    counts: dict[int | None, int] = {}
    rest = []
    for pair in pairs:
        counts[pair.process] = counts.get(pair.process, 0) + 1
        if counts[pair.process] > warmup_pairs:
            rest.append(pair)
    return rest


def _process_note(used: list[_Pair]) -> str:
    """A note on the differences between processes that this comparison does not average out."""
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
    """Convert a log-ratio to percent, at most 1e6, so that it stays finite in JSON."""
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
