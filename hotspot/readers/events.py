"""The events of a Chrome trace, from JSON as profilers write it: not always valid.

Names may hold raw newlines and single backslashes (paths of Windows), values may be `inf`, and a
quote in a name may end it early. All this lies where nothing is read, so it is repaired. If that
does not help, the events are parsed one by one, and a broken one is left out unless it is GPU work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from patcher.bench import UsageError
from patcher.hotspot.profile import ProfileWarning
from patcher.hotspot.readers.leftout import left_out

RECORD = (
    "record 3 to 20 steps with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
    'ProfilerActivity.CUDA]), then prof.export_chrome_trace("trace.json.gz")'
)
Event = dict[str, Any]

KERNEL = frozenset(["kernel"])
MEMORY = frozenset(["gpu_memcpy", "gpu_memset", "memcpy", "memset"])
_CALLS = ("runtime", "driver")
"""Endings of `cuda_runtime`, `cuda_driver`, `xpu_runtime`, `privateuse1_runtime`, ..."""

_BACKSLASH = re.compile(r'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])?')
_NOT_FINITE = re.compile(
    r"(:\s{0,20})[-+]?(?:inf(?:inity)?|nan(?:\(\w{0,9}\))?|1\.#\w{1,6})(?=\s{0,20}[,}\]])",
    re.IGNORECASE,
)
_COMMA = re.compile(r",(?=\s{0,200}[\]}])")
_EVENT = re.compile(r'[\[,]\s{0,200}(?=\{\s{0,200}")')
_NAME = re.compile(
    r'("name"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|s)"\s*:|"\s*\}\s*$)',
    re.DOTALL,
)
_WORK = re.compile(r'"cat"\s*:\s*"(?:kernel|gpu_mem\w*|mem\w*)"', re.IGNORECASE)
_TAIL = re.compile(r"\}\s*\](?:[^{}]*\}|\s*)\s*$")
_MOST_LOST = 10_000
_LONGEST = 100_000
"""Characters of a broken event; a longer one is damage of another kind."""


@dataclass
class Events:
    """The events of a trace that matter, by kind."""

    kernels: list[Event] = field(default_factory=list)
    memory: list[Event] = field(default_factory=list)
    calls: list[Event] = field(default_factory=list)
    """Calls of a runtime or driver."""
    ranges: list[Event] = field(default_factory=list)
    """Annotations on the host."""
    gpu_ranges: list[Event] = field(default_factory=list)
    """The same projected onto the GPU, if Kineto wrote them."""
    nameless: list[Event] = field(default_factory=list)
    """Events without a category, which torch.profiler does not write."""
    processes: dict[object, str] = field(default_factory=dict)
    """Names of processes by `pid`."""
    others: set[str] = field(default_factory=set)
    """Categories of other makes' accelerators."""
    properties: list[Any] = field(default_factory=list)
    """`deviceProperties`."""
    warnings: tuple[ProfileWarning, ...] = ()
    any: bool = False


def read_events(text: str, name: str) -> Events:
    """Parse a trace and sort its events by kind.

    Raises:
        UsageError: the text is no trace, or truncated, or an event of GPU work is broken.
    """
    if text.lstrip()[:1] not in ("{", "["):
        if "Self CPU %" in text[:20_000] and "# of Calls" in text[:20_000]:
            message = (
                f"{name} is a table of key_averages, which clips kernel names at 55 characters"
            )
            raise UsageError(message, RECORD)
        raise UsageError(f"{name} is not JSON, so it is no trace of torch.profiler", RECORD)
    document, warnings = _document(text, name)
    found = document if isinstance(document, list) else document.get("traceEvents")
    if not isinstance(found, list):
        raise UsageError(f"{name} is JSON without traceEvents, so it is no trace", RECORD)
    events = Events(warnings=warnings, any=bool(found))
    properties = document.get("deviceProperties") if isinstance(document, dict) else None
    events.properties = properties if isinstance(properties, list) else []
    for event in found:
        if isinstance(event, dict):
            _sort(event, events)
    return events


def _document(text: str, name: str) -> tuple[Any, tuple[ProfileWarning, ...]]:
    try:
        return _parsed(text), ()
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply for a trace", RECORD) from None
    except json.JSONDecodeError as error:
        reason = " ".join(str(error).split())[:120]
    except ValueError:
        reason = "a number has thousands of digits"
    if text.rstrip()[-1:] not in ("}", "]"):
        message = f"{name} is incomplete JSON ({reason}): it may be cut off"
        raise UsageError(message, RECORD)
    repaired = _COMMA.sub(
        "", _NOT_FINITE.sub(r"\1NaN", _BACKSLASH.sub(lambda m: m[0] if m[1] else r"\\", text))
    )
    note = f"its JSON is invalid where nothing is read and was repaired ({reason})"
    warning = ProfileWarning(kind="repaired", message=note)
    try:
        return _parsed(repaired), (warning,)
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply for a trace", RECORD) from None
    except ValueError:
        document, lost = _one_by_one(repaired, name, reason)
    why = f"the JSON is broken ({reason}); record without with_stack, or with torch 2.1 or newer"
    whole = lost + len(document["traceEvents"])
    return document, (warning, *left_out("broken_events", lost, whole, "events", why))


def _parsed(text: str) -> Any:
    """Numbers with a point stay text: a float of microseconds does not resolve nanoseconds."""
    return json.loads(text, parse_float=str, parse_constant=str, object_hook=_slim, strict=False)


def _slim(item: dict[str, Any]) -> dict[str, Any] | None:
    """Drop irrelevant events while parsing, since most of a trace is CPU operators."""
    if "ph" not in item or "traceEvents" in item:
        return item
    if item["ph"] == "M":
        return item if item.get("name") == "process_name" else None
    category = item.get("cat")
    if item["ph"] != "X" or not (category is None or isinstance(category, str)):
        return None
    kind = (category or "").lower()
    return item if category is None or _relevant(kind) else None


def _relevant(kind: str) -> bool:
    return (
        kind in KERNEL
        or kind in MEMORY
        or kind.endswith((*_CALLS, "annotation"))
        or kind.startswith(("mtia", "hpu", "glow"))
    )


def _sort(event: Event, events: Events) -> None:
    if event.get("ph") == "M":
        arguments = event.get("args")
        if isinstance(arguments, dict) and isinstance(event.get("pid"), int | str):
            events.processes[event["pid"]] = str(arguments.get("name"))[:200]
        return
    category = event.get("cat")
    if category is None:
        if event.get("ph") == "X":
            events.nameless.append(event)
        return
    if not isinstance(category, str):
        return
    kind = category.lower()
    if kind in KERNEL:
        events.kernels.append(event)
    elif kind in MEMORY:
        events.memory.append(event)
    elif kind.startswith(("mtia", "hpu", "glow")):
        events.others.add(category[:40])
    elif kind.endswith(_CALLS):
        events.calls.append(event)
    elif kind.endswith("annotation"):
        (events.gpu_ranges if kind.startswith("gpu_") else events.ranges).append(event)


def _one_by_one(text: str, name: str, reason: str) -> tuple[dict[str, Any], int]:
    """The events that can be parsed, and how many cannot.

    Raises:
        UsageError: the text is cut off, or one of the others is GPU work.
    """
    if _TAIL.search(text[-_LONGEST:]) is None:
        raise UsageError(f"{name} is incomplete JSON ({reason}): it may be cut off", RECORD)
    events: list[Any] = []
    properties: list[Any] = []
    lost = 0
    for piece in _pieces(text):
        try:
            item = _parsed(piece)
        except (ValueError, RecursionError):
            item = _requoted(piece)
        if item is not None and "ph" in item:
            events.append(item)
        elif item is not None and "name" in item and "id" in item:
            properties.append(item)
        elif item is None and not _is_dropped(piece):
            lost += 1
            if _WORK.search(piece) or lost > _MOST_LOST:
                message = f"{name} has a kernel or copy that is broken JSON ({reason})"
                raise UsageError(message, RECORD)
    return {"traceEvents": events, "deviceProperties": properties}, lost


def _pieces(text: str) -> Iterator[str]:
    """The text of each object in a list, up to the start of the next."""
    starts = [match.end() for match in _EVENT.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        piece = text[start:end].rstrip(", \t\r\n[")
        close = piece.rfind("}")
        if end == len(text):  # the list, and the document around it, end here too
            tail = _TAIL.search(piece)
            close = tail.start() if tail else -1
        yield piece[: close + 1] if close >= 0 else piece


def _is_dropped(piece: str) -> bool:
    """Whether the piece is valid and only irrelevant: `_slim` answers None for both."""
    try:
        json.loads(piece, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _requoted(piece: str) -> Any:
    """The event with the quotes inside its name escaped; None if that does not help."""
    match = _NAME.search(piece) if len(piece) < _LONGEST else None
    if match is None:
        return None
    inner = re.sub(r'(?<!\\)"', r"\"", match[2])
    try:
        return _parsed(piece[: match.start(2)] + inner + piece[match.end(2) :])
    except (ValueError, RecursionError):
        return None
