"""Shares of yes-or-no results that come in groups, such as samples of one task, with intervals.

Samples of one task are alike, so that they count for less than as many independent ones. The
variance between groups gives the number of independent samples that they are worth (Korn and
Graubard, Survey Methodology 24, 193, 1998), of which the interval is Wilson's (JASA 22, 209,
1927): it is sound at 0 and at 1, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from patcher.bench.records import Record
from patcher.bench.stats.intervals import NORMAL, half_width


class ShareInterval(Record):
    """A share, or a difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


def grouped_share(groups: Sequence[Sequence[bool]]) -> ShareInterval:
    """The mean of the groups' shares, each group with equal weight.

    Args:
        groups: at least one; none is empty.
    """
    means = [statistics.fmean(group) for group in groups]
    share, count = statistics.fmean(means), len(groups)
    worth = float(count)  # at 0, at 1, and where nothing is known of the variance
    variance = statistics.variance(means) / count if count > 1 else 0.0
    if 0 < share < 1 and variance > 0:
        worth = min(max(share * (1 - share) / variance, 1.0), sum(map(len, groups)))
    low, high = wilson(share, worth)
    return ShareInterval(value=share, low=low, high=high)


def wilson(share: float, count: float, confidence_pct: float = 95.0) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` independent results."""
    z = NORMAL.inv_cdf(0.5 + confidence_pct / 200)
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    # at 0 and 1 the bound is exact, and rounding must not move it
    low = 0.0 if share == 0 else (middle - half) / whole
    return low, 1.0 if share == 1 else (middle + half) / whole


def paired_difference(
    before: Sequence[Sequence[bool]], after: Sequence[Sequence[bool]]
) -> ShareInterval:
    """The mean over groups of the difference of shares, after less before.

    Student's interval over the groups; where all differ alike, which tells nothing of the
    variance, Newcombe's of both shares (Statistics in Medicine 17, 873, 1998), as if unpaired.

    Args:
        before, after: the same groups in the same order.
    """
    pairs = zip(before, after, strict=True)
    gaps = [statistics.fmean(late) - statistics.fmean(early) for early, late in pairs]
    gap = statistics.fmean(gaps)
    if len(set(gaps)) > 1:
        half = half_width(gaps)
        return ShareInterval(value=gap, low=max(gap - half, -1.0), high=min(gap + half, 1.0))
    old, new = grouped_share(before), grouped_share(after)
    low = gap - math.hypot(new.value - new.low, old.high - old.value)
    high = gap + math.hypot(new.high - new.value, old.value - old.low)
    return ShareInterval(value=gap, low=max(low, -1.0), high=min(high, 1.0))
