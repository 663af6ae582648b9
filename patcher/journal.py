"""The journal of a run: append-only JSON lines, an intent before an effect, its result after it.

State is what `fold` says of the events, nothing else. Every line carries the sha256 of the line
before it, so that an edit is found; a line torn by a kill has no newline and is dropped when the
journal is opened again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import ValidationError

from bench import SCHEMA_VERSION, Record, UsageError, VerificationError

GENESIS = "0" * 64
"""`prev` of the first line."""

Kind = Literal["intent", "result", "note"]


class Event(Record):
    """One line of the journal."""

    schema_version: int = SCHEMA_VERSION
    seq: int
    time: str
    """ISO 8601, UTC."""
    kind: Kind
    step: str
    data: dict[str, Any]
    prev: str
    """sha256 of the line before, without its newline."""


class State(Record):
    """What the journal says has happened."""

    results: dict[str, dict[str, Any]]
    """Finished steps in the order they finished, with the data of their result."""
    pending: tuple[str, ...]
    """Steps begun and not finished: the process died, was interrupted, or the step failed."""
    notes: tuple[Event, ...]


def fold(events: Iterable[Event]) -> State:
    """The state after these events."""
    results: dict[str, dict[str, Any]] = {}
    pending: dict[str, None] = {}
    notes: list[Event] = []
    for event in events:
        match event.kind:
            case "intent":
                pending[event.step] = None
            case "result":
                pending.pop(event.step, None)
                results[event.step] = event.data
            case "note":
                notes.append(event)
    return State(results=results, pending=tuple(pending), notes=tuple(notes))


def read_events(path: Path) -> list[Event]:
    """The events of a journal that another process may be writing; an unfinished last line is left
    out.

    Raises:
        UsageError: there is no such file.
        VerificationError: a line is damaged or the chain is broken.
    """
    return _parse(_read(path))[0]


class Journal:
    """The one writer of a journal; holds a lock until closed.

    Raises:
        UsageError: another process writes this journal.
        VerificationError: the file is damaged beyond a torn last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _acquire(path.with_suffix(".lock"))
        try:
            fresh = not path.exists()
            content = b"" if fresh else _read(path)
            events, whole, self._prev = _parse(content)
            self.events: list[Event] = events
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except BaseException:
            os.close(self._lock)
            raise
        if whole < len(content):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        if fresh:
            sync_folder(path.parent)

    def append(self, kind: Kind, step: str, data: dict[str, Any] | None = None) -> Event:
        """Add one event and flush it to the disk."""
        event = Event(
            seq=len(self.events),
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            kind=kind,
            step=step,
            data=data or {},
            prev=self._prev,
        )
        line = json.dumps(
            event.model_dump(mode="json"), ensure_ascii=False, allow_nan=False
        ).encode()
        _write_all(self._file, line + b"\n")
        os.fsync(self._file)
        self._prev = hashlib.sha256(line).hexdigest()
        self.events.append(event)
        return event

    def close(self) -> None:
        """Release the lock. Closing twice is the same as once."""
        if self._lock >= 0:
            os.close(self._file)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable: a new or renamed file is lost in a power cut otherwise."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", "give the folder of a run"
        ) from error


def _acquire(path: Path) -> int:
    """Lock the file, write our pid into it, return its handle. The kernel frees it when the process
    dies."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise UsageError(
            f"the run {path.parent.name} is being written by process {owner}",
            f"wait for process {owner} to end, or stop it",
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _parse(content: bytes) -> tuple[list[Event], int, str]:
    """Events, the length of the whole lines, and the hash of the last line."""
    whole = content.rfind(b"\n") + 1
    events: list[Event] = []
    prev = GENESIS
    for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
        try:
            event = Event.model_validate_json(line)
        except ValidationError as error:
            raise _damaged(number, "is not an event") from error
        if event.prev != prev or event.seq != number - 1:
            raise _damaged(number, "does not follow from the line before it")
        prev = hashlib.sha256(line).hexdigest()
        events.append(event)
    return events, whole, prev


def _damaged(number: int, why: str) -> VerificationError:
    return VerificationError(
        f"the journal is damaged: line {number} {why}",
        "restore journal.jsonl from a copy, or start a new run",
    )
