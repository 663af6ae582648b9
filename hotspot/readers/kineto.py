"""Read traces of torch.profiler (Kineto): Chrome trace events as JSON, plain or gzip.

Times are microseconds with three decimals, too large for a float to resolve the nanosecond.
Numbers with a decimal point therefore stay text until they are converted to integers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from patcher.bench import UsageError
from patcher.hotspot.marks import mark_of
from patcher.hotspot.names import printable
from patcher.hotspot.owners import Marks, between, owners, step_marks, with_steps
from patcher.hotspot.profile import ProfileWarning
from patcher.hotspot.readers.content import read_damaged_text
from patcher.hotspot.readers.events import RECORD, Event, Events, read_events
from patcher.hotspot.readers.hosts import (
    Hosts,
    KernelCalls,
    Placed,
    calls_of,
    identity,
    is_merged,
    place,
    ranges_of,
    without_calls,
)
from patcher.hotspot.readers.leftout import around_others, impossible, left_out
from patcher.hotspot.readers.makers import described, other_maker
from patcher.hotspot.readers.times import (
    DamagedError,
    MergedError,
    TimedEvents,
    interval,
    timed_events,
)
from patcher.hotspot.recording import Launches, NamedSteps, Recording
from patcher.hotspot.timeline import Integers

MAX_TRACE = 1 << 30
"""Bytes of JSON: about 3 million events or hundreds of decode steps. Parsed, it takes several
times as much memory."""
NAMELESS = "(kernel without a name)"
UNTIMED = "the profiler wrote no time, a negative one, or time 0"
OVERLAPPING = "the time holds several later kernels of the same stream, which cannot be"
UNFINISHED = "the recording ended first"


def read_kineto(path: Path, window: str | None = None) -> Recording:
    """Read a trace's kernel launches, copies and fills, steps and GPUs.

    Args:
        path: the trace.
        window: name of annotations; only kernels launched inside them are read.

    Raises:
        UsageError: the file is no trace, truncated, damaged, too large, without GPU work,
            or without that window.
    """
    text, replaced = read_damaged_text(path, MAX_TRACE, RECORD)
    events = read_events(text, path.name)
    del text
    if replaced:
        note = f"{replaced} in its names were replaced: the profiler wrote a name as it found it"
        events.warnings = (ProfileWarning(kind="repaired", message=note), *events.warnings)
    if not events.kernels:
        what = other_maker(events) or (
            "holds CPU operators but no GPU kernels" if events.any else "holds no events"
        )
        raise UsageError(f"{path.name} {what}", RECORD)
    try:
        return _recording(events, path.name, window)
    except MergedError as error:
        raise UsageError(
            f"{path.name} is merged from several ranks that cannot be told apart: {error}",
            "give the trace of one rank, or merge them with a `pid` for each rank's GPU",
        ) from None
    except (DamagedError, OverflowError) as error:
        message = f"{path.name} is damaged: {error}"
        raise UsageError(message, RECORD) from None


def _recording(events: Events, name: str, window: str | None) -> Recording:
    kernels = timed_events(events.kernels)
    if not len(kernels.start):
        raise DamagedError("no kernel has a usable time")
    memory = timed_events(events.memory)
    placed = place(kernels, memory)
    hosts = Hosts()
    calls = calls_of(events.calls, hosts, kernels, placed)
    launches = _launches(kernels, placed)
    warnings = [
        *events.warnings,
        *left_out("untimed", kernels.lost, len(events.kernels), "kernels", UNTIMED),
        *left_out("untimed", memory.lost, len(events.memory), "copies and fills", UNTIMED),
    ]
    if around_others(launches):
        wrong = impossible(launches, calls.number)
        if is_merged(int(wrong.sum()), len(wrong)):
            raise MergedError("many kernels of one stream run at the same time")
        warnings += left_out("overlapping", int(wrong.sum()), len(wrong), "kernels", OVERLAPPING)
        launches, calls = launches.chosen(~wrong), calls.chosen(~wrong)
    launches, steps, more = _steps(events, hosts, placed, launches, calls)
    if window is not None:
        launches = launches.chosen(_inside(events, hosts, window, launches, calls, name))
    gpus = described(events.properties, launches.device, placed.number)
    busiest = Counter(launches.device.tolist()).most_common(1)[0][0]
    return Recording(
        source=f"torch.profiler trace {name}",
        launches=launches,
        memory=_memory(memory, placed),
        steps=steps,
        gpu=gpus.get(busiest),
        gpus=gpus,
        labels=placed.labels,
        warnings=(*warnings, *more),
    )


def _launches(kernels: TimedEvents, placed: Placed) -> Launches:
    codes: dict[str, int] = {}
    name = []
    for event in kernels.events:
        spelled = event.get("name") or ""
        if not isinstance(spelled, str):
            raise DamagedError("a kernel's name is no text")
        text = printable(spelled) if spelled.strip() else NAMELESS
        name.append(codes.setdefault(text, len(codes)))
    order = kernels.order
    return Launches(
        texts=tuple(codes),
        name=np.array(name, dtype=np.int32)[order],
        start=kernels.start[order],
        end=kernels.end[order],
        device=placed.device[order],
        stream=placed.stream[order],
    )


def _memory(memory: TimedEvents, placed: Placed) -> Integers | None:
    """Shape (n, 3): device, start and end (ns); None without copies and fills."""
    if not len(memory.start):
        return None
    return np.stack([placed.memory, memory.start, memory.end], axis=1)


def _inside(
    events: Events,
    hosts: Hosts,
    window: str,
    launches: Launches,
    calls: KernelCalls,
    name: str,
) -> NDArray[np.bool_]:
    ranges, _ = ranges_of(events.ranges, hosts, window)
    if not len(ranges):
        names = sorted({str(event.get("name"))[:40] for event in events.ranges})[:8]
        listed = ", ".join(map(printable, names))
        has = f"it has: {listed}" if names else "it has no annotations; omit --window"
        raise UsageError(f"{name} has no annotation {window!r}", has)
    owner = between(owners(ranges, calls.calls), launches.device, calls.calls)
    if not (owner >= 0).any():
        message = f"{name} has no kernel launched inside {window!r}"
        raise UsageError(message, "give a range around the launches, or omit --window")
    inside: NDArray[np.bool_] = owner >= 0
    return inside


def _steps(
    events: Events, hosts: Hosts, placed: Placed, launches: Launches, calls: KernelCalls
) -> tuple[Launches, NamedSteps | None, list[ProfileWarning]]:
    """The steps by the host's ranges, else by those that Kineto projected onto the GPU.

    Kineto's projection holds what one thread launched; autograd's thread is missing in it.
    """
    ranges, unfinished = ranges_of(events.ranges, hosts, None)
    marks = step_marks(ranges)
    whole = unfinished + (len(marks.ranges) if marks else 0)
    warnings = list(left_out("unfinished_steps", unfinished, whole, "steps", UNFINISHED))
    if marks is not None:
        found = _owned(marks, launches, calls)
        if found is None and (steps := _projected(events.gpu_ranges, placed)) is not None:
            return launches, steps, warnings
        if found is None and not (calls.calls.at >= 0).any():
            found = _owned(marks, launches, without_calls(calls, launches.start))
        if found is not None:
            launches, steps, empty = found
            why = "no kernel was launched inside"
            warnings += left_out("empty_steps", empty, whole, "steps", why)
            return launches, steps, warnings
    return launches, _projected(events.gpu_ranges, placed), warnings


def _owned(
    marks: Marks, launches: Launches, calls: KernelCalls
) -> tuple[Launches, NamedSteps, int] | None:
    """The launches with their steps, the steps, and how many marks started no kernel."""
    owner = between(owners(marks.ranges, calls.calls), launches.device, calls.calls)
    launches, steps = with_steps(launches, owner, marks.phases)
    if steps is None:
        return None
    return launches, steps, len(marks.ranges) - len(np.unique(owner[owner >= 0]))


def _projected(events: list[Event], placed: Placed) -> NamedSteps | None:
    """The steps as Kineto projected them onto the GPU: one range per device and stream."""
    marks = {event["name"]: mark_of(event["name"]) for event in events if _is_named(event)}
    levels = [mark.level for mark in marks.values() if mark is not None]
    rows: list[tuple[int, str, int, int]] = []
    for event in events:
        mark = marks.get(event.get("name")) if _is_named(event) else None
        times = interval(event)
        if mark is not None and mark.level == min(levels) and times is not None:
            rows.append((_device_of(event, placed), event["name"], *times))
    steps: list[tuple[int, int, int, str]] = []
    open_: dict[tuple[int, str], int] = {}
    for device, text, start, end in sorted(rows, key=lambda row: row[2]):
        at = open_.get((device, text))
        if at is not None and start <= steps[at][1]:  # the same range on another stream
            steps[at] = (steps[at][0], max(end, steps[at][1]), device, text)
        else:
            open_[device, text] = len(steps)
            steps.append((start, end, device, text))
    if not steps:
        return None
    steps.sort(key=lambda step: (step[2], step[0]))
    told = [marks[text] for *_, text in steps]
    return NamedSteps(
        np.array([device for _, _, device, _ in steps], dtype=np.int32),
        np.array([[start, end] for start, end, _, _ in steps], dtype=np.int64),
        tuple(mark.phase if mark else None for mark in told),
    )


def _device_of(event: Event, placed: Placed) -> int:
    """The device of a projected range; the first if it names none."""
    try:
        own = identity(event)
    except DamagedError:
        return int(placed.device[0])
    return placed.number.get(own, own[0])


def _is_named(event: Event) -> bool:
    return isinstance(event.get("name"), str)
