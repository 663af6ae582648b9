"""What other programs on the machine do to blocks of timed calls.

None of it is the candidate's: a measurement that they disturbed accuses nobody and is repeated, and
what is left of the noise must not make a candidate fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from patcher.bench.judge.clockcheck import TimedBlock
from patcher.bench.stats.intervals import half_width

NOISY = math.log(2)
"""Largest half-width of the 95 % interval of the logarithm of the baseline's time."""
HELD_UP, HELD_UP_US = 0.25, 3000.0
"""Share of a block's time, and microseconds, that a thread of the baseline may wait for a CPU.

Threads meet after each parallel loop, so that one that waits holds up all: 13 to 50 ms of a block
were seen. A wait of 1.1 ms is usual as a stopped process goes on, and holds up nobody."""
DRAINED = 4.0
"""Factor by which a block may be below the median of its arm. All do the same work, so in a shorter
one an empty command cost less than usual."""


def drowned(ours: Sequence[TimedBlock], floor_us: float, spread_us: float) -> str | None:
    """The disturbance, if on a CPU the machine's noise hides a block of calls at the floor: then
    times below it accuse nobody, since the clock is the judge's.

    Args:
        spread_us: by how much empty commands differ, whose cost is taken off each block.
    """
    shortest = floor_us * ours[0].calls
    if spread_us <= shortest:
        return None
    return (
        f"empty commands, all alike, differ by {spread_us:.3g} us, and {ours[0].calls} calls may "
        f"take {shortest:.3g} us"
    )


def unsteady(theirs: Sequence[TimedBlock]) -> str | None:
    """Check whether other programs disturbed the baseline so much that a ratio means nothing.

    Only the baseline counts, so that a candidate cannot end its own trial.

    Returns:
        The problem, or None.
    """
    if held := _held_up(theirs):
        return held
    half = half_width([math.log(block.figure) for block in theirs])
    if half <= NOISY:
        return None
    low, high = (pick(block.figure for block in theirs) for pick in (min, max))
    return f"blocks of the baseline, all alike, take from {low:.3g} to {high:.3g} us a call"


def _held_up(theirs: Sequence[TimedBlock]) -> str | None:
    waited_us = statistics.median(block.waited_us for block in theirs)
    wall_us = statistics.median(block.wall_us for block in theirs)
    if waited_us <= max(HELD_UP * wall_us, HELD_UP_US):
        return None
    return (
        "other programs hold CPUs that both sides are pinned to: of the baseline, a thread that "
        f"works waits for one for {waited_us / 1e3:.3g} of a block's {wall_us / 1e3:.3g} ms"
    )


def undrained(blocks: Sequence[TimedBlock]) -> list[TimedBlock]:
    """On a CPU: the blocks, none of them below the median by more than `DRAINED`.

    The cost of an empty command is taken off each, which can leave nothing of very short calls.
    Such a block would say a gain of a thousand.
    """
    least = statistics.median(block.figure for block in blocks) / DRAINED
    return [
        replace(block, times_us=[max(block.figure, least)]) if block.figure < least else block
        for block in blocks
    ]


__all__ = ("drowned", "undrained", "unsteady")
