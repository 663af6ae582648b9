"""Which range on the host started each launch, whatever thread made the call.

A thread that opens ranges of its own is charged to these alone, so several ranks in one process
stay apart. Any other thread (autograd's, a pool's) belongs to the ranges of its process, and a
process without ranges to whatever range was open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from patcher.hotspot.marks import Phase, mark_of
from patcher.hotspot.recording import Launches, NamedSteps
from patcher.hotspot.timeline import Codes, Integers


@dataclass(frozen=True)
class Calls:
    """The call that started each launch; all launches of a CUDA graph share one."""

    at: Integers
    """Start of the call in ns on the host's clock; -1 if no call is recorded."""
    thread: Integers
    """Unique over processes; -1 as above."""
    process: Integers


@dataclass(frozen=True)
class Ranges:
    """Closed ranges on the host, in any order."""

    thread: Integers
    process: Integers
    start: Integers
    end: Integers
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def chosen(self, index: Integers) -> Ranges:
        """The ranges of these indices, in this order."""
        return Ranges(
            thread=self.thread[index],
            process=self.process[index],
            start=self.start[index],
            end=self.end[index],
            texts=tuple(self.texts[i] for i in index.tolist()),
        )


def around(ranges: Ranges, calls: Calls) -> Integers:
    """The index of the innermost range around each call on its own thread; -1 if none."""
    result = np.full(len(calls.at), -1, dtype=np.int64)
    for thread in np.unique(ranges.thread).tolist():
        mine = np.flatnonzero(calls.thread == thread)
        _fill(result, ranges, np.flatnonzero(ranges.thread == thread), calls.at, mine)
    return result


def owners(ranges: Ranges, calls: Calls) -> Integers:
    """The index of the innermost range that started each launch; -1 if none did."""
    result = around(ranges, calls)
    known = calls.at >= 0
    strange = known & ~np.isin(calls.thread, ranges.thread)
    for process in np.unique(ranges.process).tolist():
        mine = np.flatnonzero(strange & (calls.process == process))
        _fill(result, ranges, np.flatnonzero(ranges.process == process), calls.at, mine)
    mine = np.flatnonzero(strange & ~np.isin(calls.process, ranges.process))
    _fill(result, ranges, np.arange(len(ranges)), calls.at, mine)
    return result


def _fill(result: Integers, ranges: Ranges, own: Integers, times: Integers, mine: Integers) -> None:
    """Write the innermost of the ranges `own` for the calls `mine`."""
    if not len(mine) or not len(own):
        return
    own = own[np.lexsort((-ranges.end[own], ranges.start[own]))]
    starts, ends, at = ranges.start[own], ranges.end[own], times[mine]
    inner = np.searchsorted(starts, at, side="right") - 1
    parent = _parents(ends)
    late = inner >= 0
    while late.any():  # if the last range to begin has ended, try the one around it
        late[late] = ends[inner[late]] < at[late]
        inner[late] = parent[inner[late]]
        late &= inner >= 0
    result[mine] = np.where(inner >= 0, own[inner], -1)


def _parents(ends: Integers) -> Integers:
    """For each range in order of start, the last earlier one that ends no sooner; -1 if none."""
    parents, open_ranges = np.full(len(ends), -1, dtype=np.int64), list[int]()
    for index, end in enumerate(ends.tolist()):
        while open_ranges and ends[open_ranges[-1]] < end:
            open_ranges.pop()
        parents[index] = open_ranges[-1] if open_ranges else -1
        open_ranges.append(index)
    return parents


def between(owner: Integers, device: Codes, calls: Calls) -> Integers:
    """Give a launch without a call to the range that started its neighbours on the device."""
    lost = calls.at < 0
    if not lost.any() or lost.all():
        return owner
    owner = owner.copy()
    for number in np.unique(device):
        mine = np.flatnonzero(device == number)
        known = np.flatnonzero(~lost[mine])
        unknown = np.flatnonzero(lost[mine])
        if not len(known):
            continue
        after = np.searchsorted(known, unknown)
        inside = (after > 0) & (after < len(known))
        before, later = mine[known[after[inside] - 1]], mine[known[after[inside]]]
        same = owner[before] == owner[later]
        owner[mine[unknown[inside]]] = np.where(same, owner[before], -1)
    return owner


class Marks(NamedTuple):
    """The ranges that name steps."""

    ranges: Ranges
    phases: tuple[Phase | None, ...]
    """What each tells; None if nothing."""


def step_marks(ranges: Ranges) -> Marks | None:
    """The ranges that name steps, of the most telling kind, with their phases.

    A range inside another of its kind on the same thread is part of that step.
    """
    marks = {text: mark_of(text) for text in set(ranges.texts)}
    levels = [mark.level for mark in marks.values() if mark is not None]
    if not levels:
        return None
    phases: dict[str, Phase | None] = {
        text: mark.phase for text, mark in marks.items() if mark and mark.level == min(levels)
    }
    index = np.array([i for i, text in enumerate(ranges.texts) if text in phases], dtype=np.int64)
    ranked = ranges.chosen(index)
    order = np.lexsort((-ranked.end, ranked.start, ranked.thread))
    outer: list[int] = []
    told: list[Phase | None] = []
    for at in order.tolist():
        last = outer[-1] if outer else None
        phase = phases[ranked.texts[at]]
        if (
            last is not None
            and ranked.thread[last] == ranked.thread[at]
            and ranked.end[at] <= ranked.end[last]
        ):
            told[-1] = told[-1] or phase
        else:
            outer.append(at)
            told.append(phase)
    return Marks(ranked.chosen(np.array(outer, dtype=np.int64)), tuple(told))


def with_steps(
    launches: Launches, owner: Integers, phases: tuple[Phase | None, ...]
) -> tuple[Launches, NamedSteps | None]:
    """The steps on each device, from the first kernel of each to the end of its last.

    Args:
        launches: the launches in any order.
        owner: index of the mark that started each launch; -1 if none did.
        phases: the phase that each mark tells.

    Returns:
        The launches with `step` set, and the steps; None if no mark started a kernel.
    """
    inside = np.flatnonzero(owner >= 0)
    if not len(inside):
        return launches, None
    key = launches.device[inside].astype(np.int64) << 32 | owner[inside]
    keys, which = np.unique(key, return_inverse=True)
    bounds = np.empty((len(keys), 2), dtype=np.int64)
    bounds[:, 0], bounds[:, 1] = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    np.minimum.at(bounds[:, 0], which, launches.start[inside])
    np.maximum.at(bounds[:, 1], which, launches.end[inside])
    device = (keys >> 32).astype(np.int32)
    order = np.lexsort((bounds[:, 0], device))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    step = np.full(len(owner), -1, dtype=np.int64)
    step[inside] = place[which]
    marks = (keys & 0xFFFFFFFF)[order].tolist()
    steps = NamedSteps(device[order], bounds[order], tuple(phases[mark] for mark in marks))
    return replace(launches, step=step), steps
