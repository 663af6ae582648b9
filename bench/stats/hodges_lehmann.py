"""Hodges-Lehmann estimate: a robust centre of a few measurements, with its interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement

from patcher.bench.stats.intervals import half_width


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    middle: float
    """The estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def hodges_lehmann(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Hodges-Lehmann estimate of the centre of a symmetric distribution.

    The estimate is the median of the means of all pairs of values, including each value with
    itself. The interval comes from the distribution of Wilcoxon's signed-rank statistic. Normality
    is not assumed, and up to 29 % of the values may be arbitrary. Fewer than six values give no
    95 % interval by ranks; then Student's interval is used, which is infinite for one value.

    Args:
        values: the measurements.
        confidence: two-sided confidence level, between 0 and 1.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    middle = statistics.median(means)
    if 2.0 ** (1 - len(values)) > 1 - confidence:
        half = half_width(values, 100 * confidence)
        return Interval(middle, middle - half, middle + half)
    cut = _cut(len(values), (1 - confidence) / 2)
    return Interval(middle, means[cut], means[-1 - cut])


def _cut(values: int, tail: float) -> int:
    """Number of sorted pair means outside the interval on each side.

    It is one less than the number of smallest signed-rank sums whose total probability, over the
    2^values equally likely sign patterns, is at most `tail`.
    """
    ways = [1]
    for rank in range(1, values + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    within: int = sum(seen <= tail * 2**values for seen in accumulate(ways))
    return within - 1
