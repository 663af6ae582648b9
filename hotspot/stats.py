"""The launches of steady steps, their statistics, and busy, memory and wall time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.classify import classify
from patcher.hotspot.names import printable
from patcher.hotspot.profile import KernelStat, ProfileWarning
from patcher.hotspot.recording import Launches, Recording, SummaryRow
from patcher.hotspot.steps import Steps, find_steps
from patcher.hotspot.timeline import Integers, busy_time, by_device, exposed

EVERYTHING = "all"
"""The window that includes warm-up, loading and graph capture."""


@dataclass(frozen=True)
class Spans:
    """GPU time in ns, added over devices."""

    busy: int
    """Union of the kernels' intervals."""
    memory: int
    """Time that copies and fills add to that union."""
    wall: int
    """From the first launch to the end of the last."""
    exposed: Integers
    """Shape (launches,): see `timeline.exposed`."""
    waits: int
    """Number of launches before which the GPU was idle."""


def steady(
    recording: Recording, launches: Launches, window: str | None
) -> tuple[Launches, Steps | None, tuple[ProfileWarning, ...]]:
    """Select the launches of steady decode steps.

    Returns:
        The launches, the steps (None if unknown) and the warnings.
    """
    warnings = recording.warnings
    steps = find_steps(launches) if recording.steps is None else Steps.named(recording.steps)
    if steps is None:
        note = "decode steps are unknown: no `step` ranges, and no sequence of kernels repeats"
        warning = ProfileWarning(kind="steps_unknown", message=f"{note}; warm-up counts as well")
        return launches, None, (*warnings, warning)
    if window == EVERYTHING:
        return launches, steps, warnings
    inside = launches.chosen(_inside(launches.start, _stretches(steps.bounds)))
    if not len(inside):
        note = "no kernel lies in the steps that the source names; everything is ranked"
        warning = ProfileWarning(kind="steps_unknown", message=note)
        return launches, None, (*warnings, warning)
    return inside, steps, warnings


def _inside(starts: Integers, stretches: Integers) -> NDArray[np.bool_] | slice:
    """Select the starts that lie in one of the stretches; both are in order."""
    edges = np.searchsorted(starts, stretches.ravel())
    if len(stretches) == 1:
        return slice(int(edges[0]), int(edges[1]))
    chosen = np.zeros(len(starts) + 1, dtype=np.int8)
    np.add.at(chosen, edges[0::2], 1)
    np.add.at(chosen, edges[1::2], -1)
    within: NDArray[np.bool_] = np.cumsum(chosen[:-1]) > 0
    return within


def window_text(
    recording: Recording, steps: Steps | None, window: str | None, kernels: Sequence[KernelStat]
) -> str | None:
    """The ranked part of the source in one sentence; None for a summary."""
    if recording.launches is None:
        return None
    whole = int((recording.launches.end - recording.launches.start).sum())
    inside = sum(kernel.total_ns for kernel in kernels)
    if steps is None or window == EVERYTHING:
        return "everything in the source"
    left = f"; {100 * (1 - inside / whole):.1f} % of the kernel time lies outside" if whole else ""
    return f"{len(steps.bounds)} steady steps, found by {steps.source}{left}"


def spans_of(recording: Recording, launches: Launches, steps: Steps | None) -> Spans:
    """Busy, memory and wall time, added over devices."""
    own = np.zeros(len(launches), dtype=np.int64)
    busy = memory = wall = waits = 0
    bounds = None if steps is None else _stretches(steps.bounds)
    for device in by_device(launches.device):
        start, end = launches.start[device], launches.end[device]
        own[device] = exposed(start, end)
        kernels = int(own[device].sum())
        busy += kernels
        waits += int(np.count_nonzero(start[1:] > np.maximum.accumulate(end)[:-1]))
        around = np.array([[start.min(), end.max()]]) if bounds is None else bounds
        if steps is not None:  # a kernel still running when the last step ends belongs to it
            around = around.copy()
            around[-1, 1] = max(around[-1, 1], int(end.max()))
        wall += int((around[:, 1] - around[:, 0]).sum())
        if recording.memory is not None:
            number = int(launches.device[device][0])
            copies = recording.memory[recording.memory[:, 0] == number, 1:]
            both = np.concatenate((np.stack([start, end], axis=1), _clipped(copies, around)))
            memory += busy_time(both[:, 0], both[:, 1]) - kernels
    return Spans(busy, memory, max(wall, busy + memory), own, waits)


def _stretches(bounds: Integers) -> Integers:
    """Merge steps that follow one another directly."""
    fresh = np.concatenate(([True], bounds[1:, 0] > bounds[:-1, 1]))
    first = np.flatnonzero(fresh)
    last = np.append(first[1:] - 1, len(bounds) - 1)
    return np.stack([bounds[first, 0], bounds[last, 1]], axis=1)


def _clipped(intervals: Integers, around: Integers) -> Integers:
    """The intervals that begin inside one of `around`, clipped to its end."""
    place = np.searchsorted(around[:, 0], intervals[:, 0], side="right") - 1
    inside = (place >= 0) & (intervals[:, 0] < around[place, 1])
    clipped: Integers = intervals[inside].copy()
    clipped[:, 1] = np.minimum(clipped[:, 1], around[place[inside], 1])
    return clipped


def of_rows(rows: Sequence[SummaryRow]) -> tuple[KernelStat, ...]:
    """Statistics of each kernel of a summary, in order of decreasing time."""
    whole = sum(row.total_ns for row in rows)
    return _largest_first(_stat(row, whole) for row in rows)


def of_launches(launches: Launches, own: Integers) -> tuple[KernelStat, ...]:
    """Statistics of each kernel; launches of one module call count as one instance."""
    spent = launches.end - launches.start
    whole = int(spent.sum())
    kinds = len(launches.texts)
    # numpy sorts 16-bit keys by radix, in linear time
    keys = launches.name.astype(np.uint16) if kinds < 1 << 16 else launches.name
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum(np.bincount(launches.name, minlength=kinds))
    stats = []
    for code, text in enumerate(launches.texts):
        chosen = order[ends[code - 1] if code else 0 : ends[code]]
        if not len(chosen):
            continue
        each = spent[chosen]
        total, exposed_ns = int(each.sum()), int(own[chosen].sum())
        if launches.call is not None and launches.call[chosen[0]] >= 0:
            _, call = np.unique(launches.call[chosen], return_inverse=True)
            each = np.bincount(call, weights=each).astype(np.int64)
        row = SummaryRow(
            text, len(each), total, float(np.median(each)), int(each.min()), int(each.max())
        )
        stats.append(_stat(row, whole, exposed_ns))
    return _largest_first(stats)


def _largest_first(kernels: Iterable[KernelStat]) -> tuple[KernelStat, ...]:
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.total_ns, kernel.name)))


def _stat(row: SummaryRow, whole_ns: int, exposed_ns: int | None = None) -> KernelStat:
    """Classify one kernel; its share is relative to `whole_ns`."""
    name = printable(row.name)
    origin, operation = classify(name)
    return KernelStat(
        name=name,
        origin=origin,
        operation=operation,
        instances=row.instances,
        total_ns=row.total_ns,
        exposed_ns=exposed_ns,
        mean_ns=row.total_ns / row.instances,
        median_ns=row.median_ns,
        min_ns=row.min_ns,
        max_ns=row.max_ns,
        share_pct=100 * row.total_ns / whole_ns if whole_ns else 0.0,
    )
