"""Devices, streams, processes and threads of a trace, and the call behind each kernel.

A trace of one rank numbers devices and correlations once. Merged traces repeat both: there a device
is known by its process too, and a correlation belongs to the process whose calls fit the device.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.marks import mark_of
from patcher.hotspot.names import printable
from patcher.hotspot.owners import Calls, Ranges
from patcher.hotspot.readers.events import Event
from patcher.hotspot.readers.times import (
    DamagedError,
    MergedError,
    TimedEvents,
    interval,
    nanoseconds,
)
from patcher.hotspot.timeline import Codes, Integers

_INTEGER = re.compile(r"-?\d{1,20}")
Identity = tuple[int, object]
"""Device number and `pid` of GPU work."""


def is_merged(count: int, of: int) -> bool:
    """Whether so many impossible records are no damage of a few, but those of another rank."""
    return count >= max(5, 0.1 * of)


@dataclass(frozen=True)
class Placed:
    """Where the kernels ran, in the order of the file."""

    device: Codes
    stream: Codes
    memory: Integers
    """Device of each copy and fill."""
    pids: tuple[object, ...]
    """The `pid` of each kernel's event."""
    labels: dict[int, str]
    """What the trace calls devices that were renumbered."""
    number: dict[Identity, int]
    """The number of each device, by the trace's own number and its `pid`."""


def place(kernels: TimedEvents, memory: TimedEvents) -> Placed:
    """Number the devices; those of several ranks that share a number get new ones.

    Raises:
        DamagedError: a kernel or copy has no device.
    """
    own = [identity(event) for event in kernels.events]
    copies = [identity(event) for event in memory.events]
    both = dict.fromkeys((*own, *copies))
    shared = Counter(device for device, _ in both)
    labels: dict[int, str] = {}
    if all(count == 1 for count in shared.values()):
        number = {identity: identity[0] for identity in both}
    else:
        ranked = sorted(both, key=lambda each: (str(each[1]).zfill(40), each[0]))
        number = {identity: index for index, identity in enumerate(ranked)}
        for (device, pid), index in number.items():
            labels[index] = f"{printable(str(pid))[:60]} (device {device} of its trace)"
    streams: dict[object, int] = {}
    return Placed(
        device=np.array([number[each] for each in own], dtype=np.int32),
        stream=np.array([_stream(event, streams) for event in kernels.events], dtype=np.int32),
        memory=np.array([number[each] for each in copies], dtype=np.int64),
        pids=tuple(pid for _, pid in own),
        labels=labels,
        number=dict(number),
    )


def _arguments(event: Event) -> Event:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def identity(event: Event) -> Identity:
    """Device and `pid` of GPU work; in old traces the `pid` is the device.

    Raises:
        DamagedError: it has no device.
    """
    device = _integer(_arguments(event).get("device", event.get("pid")))
    if device is None:
        raise DamagedError("a kernel has no device")
    pid = event.get("pid")
    return device, pid if isinstance(pid, int | str) else None


def _integer(value: object, below: int = 1 << 31) -> int | None:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    return value if isinstance(value, int) and abs(value) < below else None


def _stream(event: Event, known: dict[object, int]) -> int:
    """The stream's number; another name of a stream, or a queue of XPU, gets a negative one."""
    arguments = _arguments(event)
    value = arguments.get("stream", arguments.get("sycl queue", event.get("tid")))
    number = _integer(value)
    if number is not None:
        return number
    return known.setdefault(str(value)[:100], -2 - len(known))


@dataclass(frozen=True)
class KernelCalls:
    """The call behind each kernel, in order of the kernels' start."""

    calls: Calls
    number: Integers
    """The kernel's correlation; -1 if it has none."""

    def chosen(self, mask: NDArray[np.bool_]) -> KernelCalls:
        """The calls of the chosen kernels."""
        each = (self.calls.at, self.calls.thread, self.calls.process)
        return KernelCalls(Calls(*(column[mask] for column in each)), self.number[mask])


class Hosts:
    """Numbers for the processes and threads of a trace, in which both may be text."""

    def __init__(self) -> None:
        self._processes: dict[object, int] = {}
        self._threads: dict[object, int] = {}

    def of(self, event: Event) -> tuple[int, int]:
        """(thread, process) of an event on the host."""
        pid, tid = str(event.get("pid")), str(event.get("tid"))
        process = self._processes.setdefault(pid, len(self._processes))
        return self._threads.setdefault((pid, tid), len(self._threads)), process


def ranges_of(events: Sequence[Event], hosts: Hosts, wanted: str | None) -> tuple[Ranges, int]:
    """The ranges that name steps, or those of one name, and how many of them never ended."""
    rows: list[tuple[int, int, int, int]] = []
    texts: list[str] = []
    unfinished = 0
    for event in events:
        text = event.get("name")
        if not isinstance(text, str):
            continue
        if mark_of(text) is None if wanted is None else text.lower() != wanted.lower():
            continue
        times = interval(event)
        if times is None:
            unfinished += 1
        else:
            rows.append((*hosts.of(event), *times))
            texts.append(text)
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    thread, process, start, end = table.T
    return Ranges(thread, process, start, end, tuple(texts)), unfinished


def calls_of(
    events: Sequence[Event], hosts: Hosts, kernels: TimedEvents, placed: Placed
) -> KernelCalls:
    """The call that launched each kernel, by its correlation.

    Raises:
        MergedError: several ranks share the number of a process, or of a device.
    """
    offered: dict[int, list[_Call]] = defaultdict(list)
    repeated: Counter[int] = Counter()
    for event in events:
        correlation, at = _correlation(event), nanoseconds(event.get("ts"))
        if correlation is not None and at is not None:
            thread, process = hosts.of(event)
            call = _Call(at, thread, process, _rank(event.get("pid")), event.get("name"))
            known = offered[correlation]
            before = next((each for each in known if each.process == process), None)
            if before is None:
                known.append(call)
            elif before.name == call.name and before.at != at:  # else runtime and driver
                repeated[process] += 1
    order = kernels.order
    number = np.array([_correlation(e) or -1 for e in kernels.events], dtype=np.int64)[order]
    start, device = kernels.start[order], placed.device[order]
    ranks = [_rank(pid) for pid in placed.pids]
    index = range(len(ranks)) if isinstance(order, slice) else order.tolist()
    choices = [offered.get(n, []) for n in number.tolist()]
    choices = [
        [call for call in calls if call.rank == ranks[at]] or calls
        for calls, at in zip(choices, index, strict=True)
    ]
    _check_told_apart(choices, device, repeated)
    served = _served(choices, start.tolist(), device.tolist())
    rows = np.full((len(number), 3), -1, dtype=np.int64)
    for at, calls in enumerate(choices):
        if calls:
            wanted = served.get(int(device[at]))
            call = next((each for each in calls if each.process == wanted), calls[0])
            rows[at] = call.at, call.thread, call.process
    return KernelCalls(Calls(rows[:, 0], rows[:, 1], rows[:, 2]), number)


@dataclass(frozen=True)
class _Call:
    at: int
    thread: int
    process: int
    rank: str
    name: object


def _check_told_apart(
    choices: Sequence[Sequence[_Call]], devices: Codes, repeated: Mapping[int, int]
) -> None:
    """Refuse ranks that were merged without numbers of their own.

    A correlation is used once in a process. A trace of one rank holds one process, so there are no
    more processes that launch than devices.
    """
    served = Counter(call.process for calls in choices for call in calls)
    if any(is_merged(repeated.get(process, 0), count) for process, count in served.items()):
        raise MergedError("calls of one process repeat their correlations")
    processes = sum(is_merged(count, len(choices)) for count in served.values())
    numbers = len(np.unique(devices))
    if processes > numbers:
        raise MergedError(f"{processes} processes launch kernels on {numbers} device numbers")


def _correlation(event: Event) -> int | None:
    value = _integer(_arguments(event).get("correlation"), 1 << 63)
    return value if value is not None and value > 0 else None


def _rank(pid: object) -> str:
    """What tools that merge traces put before a process id: `[TP01] 1234` has `[TP01] `."""
    return re.sub(r"\d{1,20}$", "", pid[:200]) if isinstance(pid, str) else ""


def _served(
    choices: Sequence[Sequence[_Call]], starts: Sequence[int], devices: Sequence[int]
) -> dict[int, int]:
    """The process of each device, where correlations of several processes are equal.

    It is the process most of whose calls come before the device's kernels, then the one that they
    follow soonest; no process serves two devices as long as others are left.
    """
    delays: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for calls, start, device in zip(choices, starts, devices, strict=True):
        if len(calls) > 1:
            for call in calls:
                delays[device][call.process].append(start - call.at)
    chosen: dict[int, int] = {}
    for device in sorted(delays):
        best = sorted(
            delays[device],
            key=lambda process: (
                process in chosen.values(),
                -sum(delay >= 0 for delay in delays[device][process]),
                abs(median(delays[device][process])),
                process,
            ),
        )
        chosen[device] = best[0]
    return chosen


def without_calls(calls: KernelCalls, starts: Integers) -> KernelCalls:
    """Let kernels stand for their calls in a trace that holds no call: both clocks are one."""
    strange = np.full(len(starts), -2, dtype=np.int64)
    return replace(calls, calls=Calls(starts, strange, strange))
