"""One comparison: log-ratio per pair, an interval of its mean, a verdict against a margin.

The interval is Student's t over pairs: both sides of a pair run the same prompts at nearly the same
time, so log-ratios are near normal. Where they are not, a wild pair widens the interval, and a sign
test must agree with an accept, so that a few wild pairs cannot bring one about. Looks are paid for
by alpha spending (Lan and DeMets 1983, with the O'Brien-Fleming-like function), so that looking
early does not make a false accept likelier.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.comparison import Comparison, Sample, Verdict, Window
from bench.errors import UsageError

MIN_PAIRS = 6
"""Fewer usable pairs are never enough for a verdict."""
SIGN_ALPHA = 0.05
"""One-sided level of the sign test beside an accept; 6 of 6 pairs or 10 of 13 reach it."""
NORMAL = statistics.NormalDist()


def compare(
    samples: Iterable[Sample | Window],
    margin_pct: float = 0.5,
    confidence_pct: float = 95.0,
    warmup_pairs: int = 1,
    dropped_pairs: frozenset[int] = frozenset(),
) -> Comparison:
    """Compare patched with baseline.

    Args:
        samples: two per pair, one of each arm; pairs in the order they were taken.
        margin_pct: gain that the lower bound must exceed to accept.
        confidence_pct: level of the two-sided interval.
        warmup_pairs: first pairs left out.
        dropped_pairs: pairs left out because their clocks drifted or throttled.

    Raises:
        UsageError: a pair lacks an arm or has one twice, or there is no usable pair; or a margin
            or level that means nothing.
    """
    if not -100 < margin_pct < math.inf:
        raise UsageError(f"margin of {margin_pct:g} %", "a margin is a gain in percent, e.g. 0.5")
    if not 0 < confidence_pct < 100:
        raise UsageError(f"confidence of {confidence_pct:g} %", "it lies between 0 and 100")
    pairs = _pairs(samples)
    used = [pair for pair in pairs[warmup_pairs:] if pair[0] not in dropped_pairs]
    dropped = len(pairs) - len(used)
    if not used:
        raise UsageError(
            f"no usable pair among {len(pairs)}", "give more pairs than the warm-up takes"
        )
    # a difference of logarithms, since a quotient can overflow
    ratios = [math.log(patched) - math.log(baseline) for _, baseline, patched in used]
    mean = statistics.fmean(ratios)
    spread = statistics.stdev(ratios) if len(ratios) > 1 else math.inf
    half = half_width(ratios, confidence_pct)
    low, high = _percent(mean - half), _percent(mean + half)
    verdict, reason = _verdict(ratios, low, high, margin_pct)
    return Comparison(
        pairs=len(used),
        dropped_pairs=dropped,
        baseline_tokens_per_s=statistics.median(baseline for _, baseline, _ in used),
        patched_tokens_per_s=statistics.median(patched for _, _, patched in used),
        gain_pct=_percent(mean),
        gain_low_pct=low,
        gain_high_pct=high,
        confidence_pct=confidence_pct,
        margin_pct=margin_pct,
        pair_sd_pct=100 * spread if math.isfinite(spread) else 0.0,
        verdict=verdict,
        reason=reason,
    )


def half_width(ratios: Sequence[float], confidence_pct: float = 95.0) -> float:
    """Of Student's interval of the mean; infinite for less than two."""
    if len(ratios) < 2:
        return math.inf
    from scipy.stats import t  # here, since importing scipy takes longer than all of bench

    quantile = float(t.ppf(0.5 + confidence_pct / 200, len(ratios) - 1))
    return quantile * statistics.stdev(ratios) / math.sqrt(len(ratios))


def _verdict(
    ratios: list[float], low: float, high: float, margin_pct: float
) -> tuple[Verdict, str]:
    if len(ratios) < MIN_PAIRS:
        return "inconclusive", f"{len(ratios)} usable pairs are too few: {MIN_PAIRS} at least"
    above = sum(ratio > math.log1p(margin_pct / 100) for ratio in ratios)
    if low > margin_pct:
        if _at_least(above, len(ratios)) > SIGN_ALPHA:
            return (
                "inconclusive",
                f"the mean is above the margin, but only {above} of {len(ratios)} pairs are",
            )
        return "accept", f"the interval's lower end {low:+.2f} % is above the margin"
    if high < margin_pct:
        return "reject", f"the interval's upper end {high:+.2f} % is below the margin"
    spread = statistics.stdev(ratios)
    gain = statistics.fmean(ratios)
    needed = pairs_needed(100 * spread, _percent(gain), margin_pct)
    more = f"; about {needed} pairs would tell" if needed is not None else ""
    return "inconclusive", f"the interval holds the margin of {margin_pct:g} %{more}"


def pairs_needed(
    pair_sd_pct: float, gain_pct: float, margin_pct: float = 0.5, power: float = 0.9
) -> int | None:
    """Pairs at which a true gain clears the margin with this power; None at the margin itself."""
    distance = abs(gain_pct - margin_pct)
    if distance < 1e-9:
        return None
    total = NORMAL.inv_cdf(0.975) + NORMAL.inv_cdf(power)
    return max(math.ceil((total * pair_sd_pct / distance) ** 2) + 2, MIN_PAIRS)


def look_confidences(looks: int, confidence_pct: float = 95.0) -> list[float]:
    """Level of the interval at each of `looks` evenly spaced looks.

    O'Brien-Fleming-like spending: alpha(t) = 2 - 2 Phi(z_{alpha/2} / sqrt(t)). Each look uses the
    alpha newly spent, which is conservative (the looks' dependence is not used).
    """
    alpha = 1 - confidence_pct / 100
    z = NORMAL.inv_cdf(1 - alpha / 2)
    spent = [2 - 2 * NORMAL.cdf(z / math.sqrt((i + 1) / looks)) for i in range(looks)]
    fresh = [now - before for now, before in zip(spent, [0.0, *spent[:-1]], strict=True)]
    return [100 * (1 - part) for part in fresh]


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


def _pairs(samples: Iterable[Sample | Window]) -> list[tuple[int, float, float]]:
    """(pair, baseline, patched) in order of first appearance."""
    arms: dict[int, dict[str, float]] = {}
    for sample in samples:
        held = arms.setdefault(sample.pair, {})
        if sample.arm in held:
            raise UsageError(f"pair {sample.pair} has {sample.arm} twice", "number pairs apart")
        held[sample.arm] = sample.tokens_per_s
    for pair, held in arms.items():
        if len(held) != 2:
            [only] = held
            raise UsageError(f"pair {pair} has only {only}", "give both arms of every pair")
    return [(pair, held["baseline"], held["patched"]) for pair, held in arms.items()]


def _at_least(hits: int, trials: int) -> float:
    """Chance of so many heads or more in that many tosses."""
    return math.fsum(math.comb(trials, k) / 2**trials for k in range(hits, trials + 1))


def _percent(log_ratio: float) -> float:
    """Percent, within +-1e6: a number stays one in JSON."""
    return 100 * math.expm1(min(log_ratio, math.log1p(1e4)))


__all__: Sequence[str] = (
    "compare",
    "half_width",
    "look_confidences",
    "pairs_needed",
    "read_samples",
)
