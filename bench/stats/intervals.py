"""Confidence interval of the mean of log-ratios with correlated neighbours.

Consecutive pairs are not independent: a machine drifts, warms up and changes its clocks. The mean
is therefore tested with blocks of every length that leaves at least `MIN_BLOCKS` blocks. Block
means are closer to independent than pairs (batch means: Conway 1963; blocking: Flyvbjerg and
Petersen, J. Chem. Phys. 91, 461, 1989). Each block length gives a Student's t interval, and the
widest one counts. This needs no estimate of the correlation, which few pairs cannot provide
(Zwiers and von Storch, J. Climate 8, 336, 1995).

If samples name their processes, the process is a random effect: t over the means of process pairs,
with one degree of freedom less than their number. This is exact if all process pairs have equally
many pairs; Satterthwaite's and Kenward and Roger's degrees of freedom (Biometrics 53, 983, 1997)
agree in that case. `bench/results/statistics/` holds the simulated error rates and power.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, TypeVar

from patcher.bench.stats.comparison import Verdict

MIN_PAIRS = 6
"""Smallest number of usable pairs for a verdict."""
MIN_BLOCKS = 8
"""Smallest number of blocks. Fewer leave too few degrees of freedom: accepting a true gain would
take far more pairs."""
MIN_PROCESS_PAIRS = 3
"""Smallest number of process pairs that shows the difference between processes."""
DEFAULT_PROCESS_PAIRS = 4
"""The half-width is 4.3 standard errors with three process pairs, and 3.2 with four."""
DEFAULT_PAIRS = 66
"""Most pairs of one session. It detects a gain of twice the margin in nine sessions of ten, even
if neighbours are correlated (rho 0.6) or the pairs drift."""
LOOKS = 3
"""Number of interim looks of a session, the last one included."""
SIGN_ALPHA = 0.05
"""One-sided level of the sign test that an accept also needs; 6 of 6 or 10 of 13 pairs pass."""
NORMAL = statistics.NormalDist()


class Spread(NamedTuple):
    """The standard error of the mean at one block length."""

    error: float
    """Standard error of the mean, as a log-ratio."""
    degrees: int
    """Degrees of freedom of Student's t."""
    block: int
    """Pairs per block; 0: a block is a process pair."""


@dataclass(frozen=True)
class Mean:
    """A mean log-ratio with its standard errors; the widest interval counts."""

    value: float
    """The mean log-ratio."""
    spreads: tuple[Spread, ...]
    """One per block length; empty for fewer than two pairs."""

    def widest(self, confidence_pct: float) -> tuple[float, Spread | None]:
        """The widest two-sided interval: its half-width as a log-ratio, and its spread."""
        if not self.spreads:
            return math.inf, None
        # not scipy.stats: importing it takes longer than all of bench
        from scipy.special import stdtrit

        level = 0.5 + confidence_pct / 200
        return max((float(stdtrit(s.degrees, level)) * s.error, s) for s in self.spreads)

    def p_above(self, threshold: float) -> float:
        """p-value of the one-sided test that the mean is above the threshold, a log-ratio."""
        from scipy.special import stdtr

        distance = self.value - threshold
        p_values = [1.0 if distance <= 0 or not self.spreads else 0.0]
        for spread in self.spreads:
            if spread.error > 0:
                p_values.append(float(stdtr(spread.degrees, -distance / spread.error)))
        return max(p_values)


def mean_of(
    ratios: Sequence[float], processes: Sequence[int] | None = None, ordered: bool = False
) -> Mean:
    """Mean of log-ratios with its standard errors.

    Args:
        ratios: log-ratios in the order they were taken.
        processes: the process pair of each pair. With at least `MIN_PROCESS_PAIRS` of them, each
            process pair has equal weight, however many pairs it has.
        ordered: whether the order effect was estimated from these pairs and removed. This costs
            single pairs one degree of freedom; blocks contain both orders and lose none.
    """
    import numpy as np

    values = np.asarray(ratios, dtype=np.float64)
    count, centre = len(values), float(values.mean())
    spreads = []
    for block in range(1, max(count // MIN_BLOCKS, 1) + 1):
        blocks = count // block
        lost = int(ordered and block == 1)
        degrees = blocks - 1 - lost
        if degrees < 1:
            break
        # a remainder is left out at the beginning, where machines warm up
        means = values[count - blocks * block :].reshape(blocks, block).mean(axis=1)
        error = float(means.std(ddof=1 + lost)) * math.sqrt(block / count)
        spreads.append(Spread(error, degrees, block))
    if processes is not None and len(set(processes)) >= MIN_PROCESS_PAIRS:
        owner = np.asarray(processes)
        groups = np.array([values[owner == one].mean() for one in dict.fromkeys(processes)])
        centre = float(groups.mean())
        error = float(groups.std(ddof=1)) / math.sqrt(len(groups))
        spreads.append(Spread(error, len(groups) - 1, 0))
    return Mean(centre, tuple(spreads))


def half_width(ratios: Sequence[float], confidence_pct: float = 95.0) -> float:
    """Half-width of Student's interval of the mean of independent values.

    Args:
        ratios: the values.
        confidence_pct: two-sided confidence level in percent.

    Returns:
        The half-width in the unit of the values; infinite for fewer than two.
    """
    if len(ratios) < 2:
        return math.inf
    quantile = student_t(len(ratios) - 1, confidence_pct)
    return quantile * statistics.stdev(ratios) / math.sqrt(len(ratios))


def student_t(degrees: int, confidence_pct: float) -> float:
    """The quantile of Student's t that a two-sided interval of this confidence uses."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence_pct / 200))


def pairs_needed(
    pair_sd_pct: float,
    gain_pct: float,
    margin_pct: float = 0.5,
    power: float = 0.9,
    rho: float = 0.0,
    looks: int = LOOKS,
) -> int | None:
    """Number of pairs at which a true gain clears the margin with the given power.

    The interval and the sign test must both agree. The result is within three percentage points of
    the simulated power of a whole session (`bench/results/statistics/`).

    Args:
        pair_sd_pct: standard deviation of a pair's log-ratio, in percent.
        gain_pct: the true gain in percent.
        margin_pct: the margin in percent.
        power: probability of an accept.
        rho: AR(1) correlation of neighbouring pairs; the effective number of pairs is the number
            times (1 - rho) / (1 + rho).
        looks: number of looks; the level of the last one is used.

    Returns:
        The number of pairs, or None if the gain equals the margin.
    """
    distance = abs(gain_pct - margin_pct)
    if distance < 1e-9:
        return None
    from scipy.special import stdtrit

    level = 0.5 + look_confidences(looks)[-1] / 200
    inflation = (1 + rho) / (1 - rho)
    on_its_side = NORMAL.cdf(distance / pair_sd_pct) if pair_sd_pct > 0 else 1.0

    def needed(degrees: int) -> float:
        quantiles = float(stdtrit(degrees, level)) + float(stdtrit(degrees, power))
        return (quantiles * pair_sd_pct / distance) ** 2

    blocked = needed(MIN_BLOCKS - 1)
    # beyond 60 pairs the interval needs more pairs than the sign test
    for pairs in range(MIN_PAIRS, 60):
        enough = needed(pairs - 1) if pairs < 2 * MIN_BLOCKS else blocked
        if enough <= pairs and at_least(sign_needs(pairs), pairs, on_its_side) >= power:
            return math.ceil(pairs * inflation)
    return math.ceil(blocked * inflation)


@cache
def sign_needs(pairs: int) -> int:
    """Smallest number of pairs above the margin with which the sign test passes."""
    return next(hits for hits in range(pairs + 2) if at_least(hits, pairs) <= SIGN_ALPHA)


def at_least(hits: int, trials: int, chance: float = 0.5) -> float:
    """Probability of at least `hits` successes in `trials` Bernoulli trials."""
    return math.fsum(
        math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
        for k in range(hits, trials + 1)
    )


def look_confidences(looks: int, confidence_pct: float = 95.0) -> list[float]:
    """Confidence level in percent of the interval at each of `looks` evenly spaced looks.

    O'Brien-Fleming-like spending: alpha(t) = 2 - 2 Phi(z_{alpha/2} / sqrt(t)). Each look uses the
    alpha newly spent. This is conservative, since the dependence between looks is ignored.
    """
    alpha = 1 - confidence_pct / 100
    z = NORMAL.inv_cdf(1 - alpha / 2)
    spent = [2 - 2 * NORMAL.cdf(z / math.sqrt((i + 1) / looks)) for i in range(looks)]
    steps = [now - before for now, before in zip(spent, [0.0, *spent[:-1]], strict=True)]
    return [100 * (1 - step) for step in steps]


class Look(NamedTuple):
    """One look at the pairs of a session."""

    taken: int
    """Pairs taken by then, including the warm-up pair, in whole ABBA blocks of two."""
    confidence_pct: float
    """Confidence level of the interval at this look, in percent."""


def schedule(max_pairs: int = DEFAULT_PAIRS, looks: int = LOOKS) -> list[Look]:
    """The evenly spaced looks of a session of at most `max_pairs` pairs after the warm-up."""
    counts = [1 + round(max_pairs * look / looks) for look in range(1, looks + 1)]
    levels = look_confidences(looks)
    return [Look(n + n % 2, level) for n, level in zip(counts, levels, strict=True)]


class HasVerdict(Protocol):
    """A result with a verdict."""

    @property
    def verdict(self) -> Verdict: ...


Result = TypeVar("Result", bound=HasVerdict)


def first_decided(looks: Sequence[Look], at: Callable[[Look], Result | None]) -> Result | None:
    """Evaluate looks in turn until one is conclusive.

    Args:
        looks: the looks in order.
        at: evaluates one look; None if it has no result.

    Returns:
        The result of the first conclusive look, else of the last look.
    """
    result = None
    for look in looks:
        result = at(look)
        if result is not None and result.verdict != "inconclusive":
            break
    return result
