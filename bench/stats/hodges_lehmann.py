"""The middle of a few measurements of which some may be far off, with its interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement

from patcher.bench.stats.intervals import half_width


@dataclass(frozen=True)
class Interval:
    """A value and what it lies between."""

    middle: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def hodges_lehmann(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Hodges and Lehmann's estimate: the median of the means of all pairs of values, each with
    itself, too; the interval is of those means by the distribution of Wilcoxon's signed ranks. It
    wants a symmetric distribution and no normal one; up to 29 % of the values may be anything.

    Under six values ranks give no interval of 95 %: then it is Student's, infinite for one.

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
    """How many of the sorted means lie outside on each side: one less than the sums of signed ranks
    that are, of the 2^values equally likely ones, together at most `tail`.
    """
    ways = [1]
    for rank in range(1, values + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    within: int = sum(seen <= tail * 2**values for seen in accumulate(ways))
    return within - 1
