"""Records that a profiler wrote wrongly: which are left out, and the sentence that says so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.profile import ProfileWarning
from patcher.hotspot.recording import Launches
from patcher.hotspot.timeline import Integers

CONTAINED = 2
"""A stream runs one launch after the other, so a launch around this many later ones is wrong. One
may be a dependent launch that began early."""
_ROUNDS = 16


def left_out(kind: str, count: int, of: int, what: str, why: str) -> tuple[ProfileWarning, ...]:
    """The warning about records that are left out; none if there are none.

    Args:
        kind: the warning's kind.
        count: records that are left out.
        of: all such records.
        what: their name in the plural.
        why: the reason, as it goes on after "because".
    """
    if not count:
        return ()
    are = "is" if count == 1 else "are"
    message = f"{count} of {of} {what} {are} left out, because {why}"
    return (ProfileWarning(kind=kind, message=message),)


def around_others(launches: Launches) -> bool:
    """Whether a launch ends after a later one of its stream, as branches of a graph do too."""
    return any(
        bool((np.maximum.accumulate(ends)[:-1] > ends[1:]).any())
        for ends in (launches.end[lane] for lane in _lanes(launches))
    )


def impossible(launches: Launches, call: Integers) -> NDArray[np.bool_]:
    """The launches whose time holds several later ones of the same stream.

    Args:
        launches: the launches in order of start.
        call: the number of the call that started each; -1 if unknown. The launches of one call
            are a graph's, whose branches may run side by side.

    Returns:
        A mask of shape (launches,).
    """
    wrong = np.zeros(len(launches), dtype=bool)
    for lane in _lanes(launches):
        places = np.arange(len(launches))[lane]
        for _ in range(_ROUNDS):
            start, end, own = launches.start[places], launches.end[places], call[places]
            longest = np.where(end >= np.maximum.accumulate(end), np.arange(len(end)), 0)
            holder = np.maximum.accumulate(longest)
            held = (end < end[holder]) & (start > start[holder]) & (own != own[holder])
            held &= (own >= 0) & (own[holder] >= 0)
            bad = np.bincount(holder[held], minlength=len(end)) >= CONTAINED
            if not bad.any():
                break
            wrong[places[bad]] = True
            places = places[~bad]
    return wrong


def _lanes(launches: Launches) -> list[Integers | slice]:
    """The launches of each stream of each device."""
    key = launches.device.astype(np.int64) << 32 | launches.stream.astype(np.int64) & 0xFFFFFFFF
    if not len(key) or bool((key == key[0]).all()):
        return [slice(None)]
    lanes, which = np.unique(key, return_inverse=True)
    order = np.argsort(which, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(which, minlength=len(lanes)))[:-1]))
