"""One measurement of a point: its pairs of blocks, when they suffice, and what they say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from patcher.bench.judge.clockcheck import TimedBlock
from patcher.bench.machine.clocks import TOLERANCE
from patcher.bench.stats.hodges_lehmann import Interval, hodges_lehmann

FEWEST_PAIRS = 6
"""With fewer pairs, Student's quantile makes any machine look busy."""


@dataclass
class Precision:
    """When to stop measuring a point."""

    fewest_pairs: int = FEWEST_PAIRS
    """Fewest pairs of blocks."""
    most_pairs: int = 24
    """Most pairs of blocks."""
    half_width: float = 0.01
    """Half-width of the log-ratio's 95 % interval at which to stop."""
    budget_s: float = 20.0
    """Time budget in seconds."""

    @property
    def tells(self) -> bool:
        """Whether the ratio matters; otherwise only the outputs of timed calls are checked."""
        return self.most_pairs >= FEWEST_PAIRS


@dataclass(frozen=True)
class Measured:
    """One measurement of a point."""

    ours: list[TimedBlock]
    """Blocks of the candidate."""
    theirs: list[TimedBlock]
    """Blocks of the baseline."""
    dropped: int
    """Number of pairs that were dropped."""
    problem: str | None
    """What is implausible of the candidate's times."""
    disturbance: str | None
    """Why other programs make it unusable."""

    @property
    def ratio(self) -> float:
        """The candidate's time over the baseline's."""
        return math.exp(-of_pairs(self.ours, self.theirs).middle)


def of_pairs(ours: Sequence[TimedBlock], theirs: Sequence[TimedBlock]) -> Interval:
    """Hodges-Lehmann estimate of the logarithm of the speedup, with its interval."""
    return hodges_lehmann(
        [math.log(b.figure / a.figure) for a, b in zip(ours, theirs, strict=True)]
    )


def are_steady(clocks: list[int | None]) -> list[bool]:
    """For each pair, whether it neither throttled nor drifted. `clocks` holds the SM clock in MHz,
    0 if unknown, None if the pair throttled.
    """
    seen = [clock for clock in clocks if clock]
    if not seen:
        return [clock is not None for clock in clocks]
    middle = statistics.median(seen)
    return [clock is not None and abs(clock - middle) <= TOLERANCE * middle for clock in clocks]
