"""The launches of steady steps, their statistics, and busy, memory and wall time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.classify import classify
from patcher.hotspot.marks import Phase
from patcher.hotspot.names import printable
from patcher.hotspot.profile import KernelStat, ProfileWarning
from patcher.hotspot.recording import Launches, NamedSteps, Recording, SummaryRow
from patcher.hotspot.steps import Steps, find_period, steps_of_layers
from patcher.hotspot.timeline import Integers, busy_time, by_device, exposed, gaps

EVERYTHING = "all"
"""The window that includes warm-up, loading and graph capture."""
LAUNCH_GAP_NS = 100_000
"""Idle time that one launch may explain; in a longer gap the host did something else."""


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
    short_waits: int = 0
    """Idle time in gaps of up to `LAUNCH_GAP_NS`."""


def added(spans: Sequence[Spans]) -> Spans:
    """The times of several devices, added up."""
    return Spans(
        busy=sum(each.busy for each in spans),
        memory=sum(each.memory for each in spans),
        wall=sum(each.wall for each in spans),
        exposed=np.concatenate([each.exposed for each in spans]),
        waits=sum(each.waits for each in spans),
        short_waits=sum(each.short_waits for each in spans),
    )


@dataclass(frozen=True)
class Chosen:
    """The launches of one device that are ranked, and the steps that they make up."""

    launches: Launches
    steps: Steps | None
    """The steps with their bounds; None if they are unknown or only counted."""
    count: int | None
    """Number of steps; None if unknown."""
    source: str | None = None
    """How the steps were found."""
    phase: Phase | None = None
    left: Mapping[str, int] = field(default_factory=dict)
    """Named steps of other phases, which are left out, by phase."""
    warnings: tuple[ProfileWarning, ...] = ()


def steady(
    recording: Recording,
    launches: Launches,
    window: str | None = None,
    layers: int | None = None,
    told: int | None = None,
) -> Chosen:
    """Select the launches of steady steps on one device.

    Args:
        recording: the source.
        launches: the device's launches, in order of start.
        window: `all` to select everything.
        layers: layers of the model, if known: a step runs some kernel as often.
        told: number of steps, as the caller says.
    """
    named = _named(recording.steps, launches)
    chosen = _by_name(launches, named, window) if named else None
    if chosen is None:
        return _by_sequence(launches, window, layers, told)
    if told is None or told == chosen.count:
        return chosen
    note = f"the source names {chosen.count} steps; {told} were given and count"
    return replace(chosen, count=told, warnings=(_unknown(note),))


def _unknown(note: str) -> ProfileWarning:
    return ProfileWarning(kind="steps_unknown", message=note)


class _Named(NamedTuple):
    """The named steps of one device that started a launch."""

    places: Integers
    """Indices into the recording's steps."""
    bounds: Integers
    phases: tuple[Phase | None, ...]
    of: int
    """Steps of the recording."""


def _named(steps: NamedSteps | None, launches: Launches) -> _Named | None:
    if steps is None or not len(launches):
        return None
    mine = np.flatnonzero(steps.device == launches.device[0])
    if launches.step is not None:
        started = np.bincount(launches.step[launches.step >= 0], minlength=len(steps)) > 0
        mine = mine[started[mine]]
    if not len(mine):
        return None
    phases: tuple[Phase | None, ...] = tuple(steps.phase[index] for index in mine.tolist())
    bounds = steps.bounds[mine]
    bounds[-1, 1] = max(bounds[-1, 1], _end_of_last(launches, bounds[:, 0]))
    return _Named(mine, bounds, phases, len(steps))


def _end_of_last(launches: Launches, begins: Integers) -> int:
    """The end of what belongs to the last step but was launched after its range.

    Some engines sample or draft after the range of a step. What most steps do before the next one
    begins is the last step's, too, if the same kernels follow it.

    Args:
        launches: the device's launches, in order of start.
        begins: where each step begins, in ns, in order.

    Returns:
        The time in ns; the begin of the last step if nothing is known to follow it.
    """
    if launches.step is None or len(begins) < 2:
        return int(begins[-1])
    lost = np.flatnonzero(launches.step < 0)
    edges = np.searchsorted(launches.start[lost], begins)
    name = launches.name[lost].astype(np.int64)
    parts = Counter(name[a:b].tobytes() for a, b in pairwise(edges.tolist()))
    usual, times = parts.most_common(1)[0]
    length = len(usual) // name.itemsize
    after = lost[edges[-1] : edges[-1] + length]
    if (
        not length
        or 2 * times <= len(begins) - 1
        or launches.name[after].astype(np.int64).tobytes() != usual
    ):
        return int(begins[-1])
    return int(launches.end[after].max())


def _by_name(launches: Launches, named: _Named, window: str | None) -> Chosen | None:
    """The launches of named steps: of decode if there are any, else of the most frequent phase."""
    counts: Counter[Phase | None] = Counter(named.phases)
    told: list[Phase] = [phase for phase in counts if phase is not None]
    phase: Phase | None = max(told, key=lambda each: counts[each], default=None)
    if "decode" in told:
        phase = "decode"
    if window == EVERYTHING:
        only = phase if len(counts) == 1 else None
        steps = Steps.named(named.bounds)
        return Chosen(launches, steps, len(named.bounds), steps.source, only)
    wanted = np.array([each == phase for each in named.phases])
    bounds = Steps.named(named.bounds).bounds[wanted]
    inside = np.zeros(len(launches), dtype=bool)
    inside[_inside(launches.start, _stretches(bounds))] = True
    if launches.step is not None:
        started = np.zeros(named.of, dtype=bool)
        started[named.places[wanted]] = True
        inside = np.where(launches.step >= 0, started[launches.step], inside)
    if not inside.any():
        return None
    left = {str(each or "unnamed"): n for each, n in counts.items() if each != phase}
    found = launches.chosen(slice(None) if inside.all() else inside)
    return Chosen(found, Steps(bounds, Steps.RANGES), len(bounds), Steps.RANGES, phase, left)


def _by_sequence(
    launches: Launches, window: str | None, layers: int | None, told: int | None
) -> Chosen:
    """The launches of steps that the sequence of kernels shows; everything if it shows none."""
    steps, doubt = find_period(launches, layers)
    if told is not None and (steps is None or len(steps.bounds) != told):
        found = f"{steps.source} shows {len(steps.bounds)} steps; " if steps else ""
        note = f"{found}everything is ranked as the {told} steps that were given"
        return Chosen(launches, None, told, "the number given", warnings=(_unknown(note),))
    if steps is not None:
        inside = launches
        if window != EVERYTHING:
            inside = launches.chosen(_inside(launches.start, _stretches(steps.bounds)))
        return Chosen(inside, steps, len(steps.bounds), steps.source)
    if layers and (count := steps_of_layers(launches, layers)):
        source = f"kernels that run {layers} times a step, once in each layer"
        return Chosen(launches, None, count, source)
    why = doubt or "no sequence of kernels repeats"
    note = f"steps are unknown: no range names them, and {why}; everything is ranked"
    return Chosen(launches, None, None, warnings=(_unknown(f"{note} (--steps N counts)"),))


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


def window_text(chosen: Chosen, window: str | None, source_ns: int, inside_ns: int) -> str:
    """The ranked part of one device in one sentence.

    Args:
        chosen: the ranked launches.
        window: `all` if everything is ranked.
        source_ns: kernel time of the whole device.
        inside_ns: kernel time of the ranked launches.
    """
    count, phase = chosen.count, f"{chosen.phase} " if chosen.phase else ""
    steady = "" if chosen.source == Steps.RANGES else "steady "
    steps = f"{count} {steady}{phase}step{'' if count == 1 else 's'}"
    if window == EVERYTHING:
        return "everything in the source"
    if chosen.steps is None:
        known = f": {steps}, found by {chosen.source}" if count else ""
        return f"everything in the source{known}"
    outside = f"; {100 * (1 - inside_ns / source_ns):.1f} % of the kernel time" if source_ns else ""
    others = ", ".join(f"{n} {phase}" for phase, n in chosen.left.items())
    left = f" ({others} steps)" if others else ""
    lies = f"{outside} lies outside{left}" if outside else ""
    return f"{steps}, found by {chosen.source}{lies}"


def spans_of(recording: Recording, launches: Launches, steps: Steps | None) -> Spans:
    """Busy, memory and wall time, added over devices."""
    own = np.zeros(len(launches), dtype=np.int64)
    busy = memory = wall = waits = short = 0
    bounds = None if steps is None else _stretches(steps.bounds)
    for device in by_device(launches.device):
        start, end = launches.start[device], launches.end[device]
        own[device] = exposed(start, end)
        kernels = int(own[device].sum())
        busy += kernels
        idle = gaps(start, end)
        waits += int(np.count_nonzero(idle))
        short += int(idle[idle <= LAUNCH_GAP_NS].sum())
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
    return Spans(busy, memory, max(wall, busy + memory), own, waits, short)


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
