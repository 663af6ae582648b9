"""The interval of a mean of log-ratios whose neighbours may resemble each other.

Pairs taken one after another are not independent: a machine drifts, warms, changes its clocks.
So the mean is tested with blocks of every length that leaves `MIN_BLOCKS` of them: means of blocks
are nearer to independent than pairs (batch means: Conway 1963; blocking: Flyvbjerg and Petersen, J.
Chem. Phys. 91, 461, 1989), each gives an interval of Student's t, and the widest one counts. That
needs no estimate of the correlation, which few pairs cannot give (Zwiers and von Storch, J. Climate
8, 336, 1995). Where samples name their processes the process is a random effect: t over the means
of process pairs, with one degree of freedom less than there are. That is exact when all have as
many pairs, and what Satterthwaite's and Kenward and Roger's degrees of freedom (Biometrics 53, 983,
1997) come to there. What each choice costs and holds: `bench/results/statistics/`.
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
"""Fewer usable pairs are never enough for a verdict."""
MIN_BLOCKS = 8
"""Fewer blocks have too few degrees of freedom: accepting a true gain would take far more pairs."""
MIN_PROCESS_PAIRS = 3
"""Fewer process pairs cannot show what two processes differ by."""
DEFAULT_PROCESS_PAIRS = 4
"""With three the interval takes 4.3 standard errors, with four 3.2."""
DEFAULT_PAIRS = 66
"""At most, in one sitting: a gain of twice the margin is found in nine sittings of ten also when
neighbours resemble each other (rho 0.6) or the pairs drift."""
LOOKS = 3
SIGN_ALPHA = 0.05
"""One-sided level of the sign test beside an accept; 6 of 6 pairs or 10 of 13 reach it."""
NORMAL = statistics.NormalDist()


class Spread(NamedTuple):
    """One estimate of how far the mean may be off."""

    error: float
    """Standard error of the mean, as a log-ratio."""
    degrees: int
    """Of freedom, of Student's t."""
    block: int
    """Pairs a block; 0: a block is a process pair."""


@dataclass(frozen=True)
class Mean:
    """A mean log-ratio with its spreads; the widest counts."""

    value: float
    spreads: tuple[Spread, ...]
    """None for less than two pairs."""

    def widest(self, confidence_pct: float) -> tuple[float, Spread | None]:
        """Half-width of the two-sided interval, and the spread it comes from."""
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
        found = [1.0 if distance <= 0 or not self.spreads else 0.0]
        for spread in self.spreads:
            if spread.error > 0:
                found.append(float(stdtr(spread.degrees, -distance / spread.error)))
        return max(found)


def mean_of(
    ratios: Sequence[float], processes: Sequence[int] | None = None, ordered: bool = False
) -> Mean:
    """Mean of log-ratios in the order they were taken.

    Args:
        ordered: the order effect was found from the same pairs and taken out. That costs single
            pairs a degree of freedom; blocks of them hold either order and are free of it anyhow.
        processes: the process pair of each; given and at least `MIN_PROCESS_PAIRS` different, each
            process pair counts once, however many pairs it has.
    """
    import numpy as np

    values = np.asarray(ratios, dtype=np.float64)
    count, centre = len(values), float(values.mean())
    spreads = []
    for block in range(1, max(count // MIN_BLOCKS, 1) + 1):
        blocks = count // block
        found = int(ordered and block == 1)
        degrees = blocks - 1 - found
        if degrees < 1:
            break
        # what does not fill a block is left out at the beginning, where machines warm up
        means = values[count - blocks * block :].reshape(blocks, block).mean(axis=1)
        error = float(means.std(ddof=1 + found)) * math.sqrt(block / count)
        spreads.append(Spread(error, degrees, block))
    if processes is not None and len(set(processes)) >= MIN_PROCESS_PAIRS:
        owner = np.asarray(processes)
        groups = np.array([values[owner == one].mean() for one in dict.fromkeys(processes)])
        centre = float(groups.mean())
        error = float(groups.std(ddof=1)) / math.sqrt(len(groups))
        spreads.append(Spread(error, len(groups) - 1, 0))
    return Mean(centre, tuple(spreads))


def half_width(ratios: Sequence[float], confidence_pct: float = 95.0) -> float:
    """Of Student's interval of the mean of independent values; infinite for less than two."""
    if len(ratios) < 2:
        return math.inf
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(ratios) - 1, 0.5 + confidence_pct / 200))
    return quantile * statistics.stdev(ratios) / math.sqrt(len(ratios))


def pairs_needed(
    pair_sd_pct: float,
    gain_pct: float,
    margin_pct: float = 0.5,
    power: float = 0.9,
    rho: float = 0.0,
    looks: int = LOOKS,
) -> int | None:
    """Pairs at which a true gain clears the margin with this power; None at the margin itself.

    The interval and the sign test must both agree. Within three points of the simulated power of a
    whole sitting (`bench/results/statistics/`).

    Args:
        rho: correlation of neighbouring pairs (AR(1)), which leaves (1 - rho) / (1 + rho) of them.
        looks: the last look's level is what counts.
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
    # with more pairs than this the sign test asks for less than the interval
    for pairs in range(MIN_PAIRS, 60):
        enough = needed(pairs - 1) if pairs < 2 * MIN_BLOCKS else blocked
        if enough <= pairs and at_least(sign_needs(pairs), pairs, on_its_side) >= power:
            return math.ceil(pairs * inflation)
    return math.ceil(blocked * inflation)


@cache
def sign_needs(pairs: int) -> int:
    """Of so many pairs, how many must be above the margin for the sign test to agree."""
    return next(hits for hits in range(pairs + 2) if at_least(hits, pairs) <= SIGN_ALPHA)


def at_least(hits: int, trials: int, chance: float = 0.5) -> float:
    """Chance of so many heads or more in that many tosses."""
    return math.fsum(
        math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
        for k in range(hits, trials + 1)
    )


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


class Look(NamedTuple):
    """When a sitting is looked at."""

    taken: int
    """Pairs taken by then, the warm-up pair with them, in whole ABBA blocks of two."""
    confidence_pct: float


def schedule(max_pairs: int = DEFAULT_PAIRS, looks: int = LOOKS) -> list[Look]:
    """The looks of one sitting."""
    counts = [1 + round(max_pairs * look / looks) for look in range(1, looks + 1)]
    levels = look_confidences(looks)
    return [Look(n + n % 2, level) for n, level in zip(counts, levels, strict=True)]


class Decides(Protocol):
    @property
    def verdict(self) -> Verdict: ...


Found = TypeVar("Found", bound=Decides)


def first_decided(looks: Sequence[Look], at: Callable[[Look], Found | None]) -> Found | None:
    """What the first look finds that decides, else the last; None where the last finds nothing."""
    found = None
    for look in looks:
        found = at(look)
        if found is not None and found.verdict != "inconclusive":
            break
    return found
