"""Read traces of torch.profiler (Kineto): Chrome trace events as JSON, plain or gzip.

Times are microseconds with three decimals, too large for a float to resolve the nanosecond.
Numbers with a decimal point therefore stay text until they are converted to integers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from patcher.bench import UsageError
from patcher.hotspot.names import printable
from patcher.hotspot.profile import Gpu
from patcher.hotspot.readers.content import read_text
from patcher.hotspot.recording import Launches, Recording
from patcher.hotspot.timeline import Integers

MAX_TRACE = 1 << 30
"""Bytes of JSON: about 3 million events or hundreds of decode steps. Parsed, it takes several
times as much memory."""
RECORD = (
    "record 3 to 20 steps with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
    'ProfilerActivity.CUDA]), then prof.export_chrome_trace("trace.json.gz")'
)
_KERNEL = frozenset(["kernel"])
_MEMORY = frozenset(["gpu_memcpy", "gpu_memset", "memcpy", "memset"])
_LAUNCH = frozenset(["cuda_runtime", "cuda_driver", "runtime", "driver"])
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_LARGEST = 1 << 61
"""Limit of a time in ns (73 years); a sum of two fits 64 bits."""
_LONGEST = 1 << 58
"""Limit in ns (9 years) of all durations together and of the trace; sums over devices fit 64
bits."""

Event = dict[str, Any]


class _DamagedError(Exception):
    """An event is malformed; the message says how."""


@dataclass
class _Events:
    """The relevant events of a trace, by kind."""

    kernels: list[Event] = field(default_factory=list)
    memory: list[Event] = field(default_factory=list)
    launches: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    """`ProfilerStep#N` on the CPU's timeline."""
    gpu_steps: list[Event] = field(default_factory=list)
    """The same steps projected onto the GPU, if Kineto wrote them."""


def read_kineto(path: Path) -> Recording:
    """Read a trace's kernel launches, copies and fills, profiler steps and GPU.

    Raises:
        UsageError: the file is no trace, truncated, damaged, too large, or without GPU work.
    """
    text = read_text(path, MAX_TRACE, RECORD)
    document = _document(text, path.name)
    del text
    events = document if isinstance(document, list) else document.get("traceEvents")
    if not isinstance(events, list):
        raise UsageError(f"{path.name} is JSON without traceEvents, so it is no trace", RECORD)
    trace = _group(events)
    if not trace.kernels:
        what = "holds CPU operators but no GPU kernels" if events else "holds no events"
        raise UsageError(f"{path.name} {what}", RECORD)
    try:
        launches = _launches(trace.kernels)
        memory = _intervals(trace.memory)
        steps = _steps(trace)
        gpu = _gpu(document, launches)
    except (_DamagedError, OverflowError) as error:
        message = f"{path.name} is damaged: {error}"
        raise UsageError(message, RECORD) from None
    return Recording(
        source=f"torch.profiler trace {path.name}",
        launches=launches,
        memory=memory,
        steps=steps,
        gpu=gpu,
    )


def _document(text: str, name: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        if "Self CPU %" in text[:20_000] and "# of Calls" in text[:20_000]:
            message = (
                f"{name} is a table of key_averages, which clips kernel names at 55 characters"
            )
            raise UsageError(message, RECORD)
        raise UsageError(f"{name} is not JSON, so it is no trace of torch.profiler", RECORD)
    try:
        return json.loads(text, parse_float=str, parse_constant=str, object_hook=_slim)
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply for a trace", RECORD) from None
    except ValueError as error:  # also raised for an integer of thousands of digits
        reason = " ".join(str(error).split())[:120]
        message = f"{name} is incomplete JSON ({reason}): it may be cut off"
        raise UsageError(message, RECORD) from None


def _slim(item: dict[str, Any]) -> dict[str, Any] | None:
    """Drop irrelevant events while parsing, since most of a trace is CPU operators."""
    if "ph" not in item or "traceEvents" in item:
        return item
    category = item.get("cat")
    if item["ph"] != "X" or not isinstance(category, str):
        return None
    kind = category.lower()
    if kind in _KERNEL or kind in _MEMORY or kind in _LAUNCH or kind.endswith("annotation"):
        return item
    return None


def _group(events: list[Any]) -> _Events:
    groups = _Events()
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("cat"), str):
            continue
        kind = event["cat"].lower()
        if kind in _KERNEL:
            groups.kernels.append(event)
        elif kind in _MEMORY:
            groups.memory.append(event)
        elif kind in _LAUNCH:
            groups.launches.append(event)
        elif isinstance(event.get("name"), str) and _STEP.fullmatch(event["name"]):
            (groups.gpu_steps if kind.startswith("gpu_") else groups.steps).append(event)
    return groups


def _launches(kernels: list[Event]) -> Launches:
    codes: dict[str, int] = {}
    name, stream = [], []
    for event in kernels:
        spelled = event.get("name")
        if not isinstance(spelled, str) or not spelled.strip():
            raise _DamagedError("a kernel has no name")
        name.append(codes.setdefault(printable(spelled), len(codes)))
        stream.append(_place(event, "stream", "tid"))
    times = _intervals(kernels)
    assert times is not None
    order = np.argsort(times[:, 1], kind="stable")
    return Launches(
        texts=tuple(codes),
        name=np.array(name, dtype=np.int32)[order],
        start=times[order, 1],
        end=times[order, 2],
        device=times[order, 0].astype(np.int32),
        stream=np.array(stream, dtype=np.int32)[order],
    )


def _intervals(events: list[Event]) -> Integers | None:
    """Shape (n, 3): device, start and end (ns); None without events."""
    if not events:
        return None
    rows = [(_place(event, "device", "pid"), *_interval(event)) for event in events]
    spent = sum(end - start for _, start, end in rows)
    span = max(end for _, _, end in rows) - min(start for _, start, _ in rows)
    if spent > _LONGEST or span > _LONGEST:
        raise _DamagedError("its kernels or copies take years")
    return np.array(rows, dtype=np.int64)


def _interval(event: Event) -> tuple[int, int]:
    start, length = _nanoseconds(event.get("ts"), "ts"), _nanoseconds(event.get("dur"), "dur")
    if length < 0:
        raise _DamagedError("a kernel or copy has a negative duration")
    return start, start + length


def _nanoseconds(value: object, what: str) -> int:
    """Convert microseconds as the trace writes them (integer or text) to whole ns."""
    if isinstance(value, int) and not isinstance(value, bool):
        result = value * 1000
    elif isinstance(value, str) and len(value) < 64:
        try:
            number = Decimal(value)
        except InvalidOperation:
            raise _DamagedError(f"{what} is {printable(value)!r}") from None
        # check the size before converting to an integer: 1e999999999 is short as text
        if not number.is_finite() or number.adjusted() > 18:
            raise _DamagedError(f"{what} is {printable(value)!r}")
        result = int((number * 1000).to_integral_value())
    else:
        raise _DamagedError(f"a kernel, copy, launch or step has no {what}")
    if abs(result) > _LARGEST:
        raise _DamagedError(f"{what} is out of range")
    return result


def _arguments(event: Event) -> Event:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _place(event: Event, argument: str, otherwise: str) -> int:
    """Device or stream: from the arguments, in old traces from process and thread."""
    value = _arguments(event).get(argument, event.get(otherwise))
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,10}", value):
        value = int(value)
    if not isinstance(value, int) or abs(value) >= 1 << 31:
        raise _DamagedError(f"a kernel has no {argument}")
    return value


def _steps(trace: _Events) -> Integers | None:
    """The GPU time of each profiler step, from its first kernel or copy to the end of its last."""
    if trace.gpu_steps:
        spans: dict[str, list[tuple[int, int]]] = {}
        for event in trace.gpu_steps:  # one per device and stream
            spans.setdefault(event["name"], []).append(_interval(event))
    else:
        spans = _projected(trace)
    whole = sorted((min(s for s, _ in each), max(e for _, e in each)) for each in spans.values())
    return np.array(whole, dtype=np.int64) if whole else None


def _projected(trace: _Events) -> dict[str, list[tuple[int, int]]]:
    """Kernels and copies by the step in which the CPU launched them.

    Only the time of the launch counts: another thread than the one that marks the steps may launch.
    """
    if not trace.steps:
        return {}
    marks = sorted((*_interval(event), str(event["name"])) for event in trace.steps)
    begins = np.array([begin for begin, _, _ in marks], dtype=np.int64)
    launch_times = {
        correlation: _nanoseconds(event.get("ts"), "ts")
        for event in trace.launches
        if isinstance(correlation := _arguments(event).get("correlation"), int)
    }
    spans: dict[str, list[tuple[int, int]]] = {}
    for event in (*trace.kernels, *trace.memory):
        correlation = _arguments(event).get("correlation")
        when = launch_times.get(correlation) if isinstance(correlation, int) else None
        if when is None:
            continue
        at = int(np.searchsorted(begins, when, side="right")) - 1
        if at >= 0 and when <= marks[at][1]:
            spans.setdefault(marks[at][2], []).append(_interval(event))
    return spans


def _gpu(document: Any, launches: Launches) -> Gpu | None:
    """Kineto's description of the device with the most kernels."""
    properties = document.get("deviceProperties") if isinstance(document, dict) else None
    if not isinstance(properties, list):
        return None
    device = Counter(launches.device.tolist()).most_common(1)[0][0]
    for each in properties:
        if (
            isinstance(each, dict)
            and each.get("id") == device
            and isinstance(each.get("name"), str)
        ):
            major, minor = each.get("computeMajor"), each.get("computeMinor")
            known = isinstance(major, int) and isinstance(minor, int)
            count = each.get("numSms")
            return Gpu(
                name=printable(each["name"])[:200],
                multiprocessors=count if isinstance(count, int) and 0 < count < 10_000 else None,
                compute_capability=f"{major}.{minor}" if known else None,
            )
    return None
