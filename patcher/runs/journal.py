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
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from patcher.bench import SCHEMA_VERSION, Record, UsageError, VerificationError
from patcher.runs import durable

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
    machine: dict[str, str] | None = None
    """The machine on which the run started over, where it did."""


START_OVER = "start-over"
"""The note after which only results of the kinds that it keeps count."""


def fold(events: Iterable[Event]) -> State:
    """The state after these events."""
    results: dict[str, dict[str, Any]] = {}
    pending: dict[str, str | None] = {}
    notes: list[Event] = []
    machine = None
    for event in events:
        match event.kind:
            case "intent":
                pending[event.step] = event.data.get("record")
            case "result":
                pending.pop(event.step, None)
                results[event.step] = event.data
            case "note":
                notes.append(event)
                if event.step == START_OVER:
                    kept, machine = event.data["kept"], event.data["machine"]
                    results = {step: a for step, a in results.items() if a["record"] in kept}
                    pending = {step: kind for step, kind in pending.items() if kind in kept}
    return State(results=results, pending=tuple(pending), notes=tuple(notes), machine=machine)


def read_events(path: Path) -> list[Event]:
    """The events of a journal that another process may be writing; an unfinished last line is left
    out.

    Raises:
        UsageError: there is no such file.
        VerificationError: a line is damaged or the chain is broken.
    """
    return _parse(_read(path))[0]


class Journal:
    """The one writer of a journal; holds a lock on it until closed.

    Raises:
        UsageError: another process writes this journal, or its file system has no locks.
        VerificationError: the file is damaged beyond a torn last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        try:
            content = _read(path)
            events, size, prev = _parse(content)
            self.events: list[Event] = events
            self._end = size, prev, len(events)
            if size < len(content):
                durable.cut(self._file, size)
            if not content:
                durable.sync_folder(path.parent)
            _owner_file(path).write_text(_identity(os.getpid()), encoding="utf-8")
        except BaseException:
            os.close(self._file)
            raise

    def append(self, kind: Kind, step: str, data: dict[str, Any] | None = None) -> Event:
        """Add one event and flush it to the disk.

        Raises:
            MissingError: the disk is full; the journal is as it was.
        """
        size, prev, seq = self._end
        event = Event(
            seq=seq,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            kind=kind,
            step=step,
            data=data or {},
            prev=prev,
        )
        line = json.dumps(
            event.model_dump(mode="json"), ensure_ascii=False, allow_nan=False
        ).encode()
        size = durable.append(self._file, line + b"\n", size)
        # at once: whoever is interrupted before this goes on from where the last line ended
        self._end = size, hashlib.sha256(line).hexdigest(), seq + 1
        self.events.append(event)
        return event

    def close(self) -> None:
        """Release the lock. Closing twice is the same as once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_written(path: Path) -> bool:
    """Whether some process writes this journal now, by the kernel's word."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # without locks nobody writes either
    finally:
        os.close(handle)
    return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", "give the folder of a run"
        ) from error


def _open_locked(path: Path) -> int:
    """A handle to append with. The lock is the kernel's and on the journal itself: it goes with its
    process however that dies, and no other file can be deleted to get around it."""
    for _ in range(_TRIES):
        handle = -1
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle  # and not one that was put in its place meanwhile
        except BlockingIOError:
            time.sleep(0.02)  # who only looks holds it for a moment
        except OSError as error:
            if handle >= 0:
                os.close(handle)
            raise UsageError(
                f"cannot write the run {path.parent.name}: {error.strerror}",
                "keep runs on a local disk that can be written: set PATCHER_RUNS_DIR",
            ) from error
        os.close(handle)
    raise _written_by_another(path)


_TRIES = 5


def _written_by_another(path: Path) -> UsageError:
    """Names the process only if it is the one that left its name: its number may be another's by
    now."""
    owner = "another process"
    try:
        said = _owner_file(path).read_text(encoding="utf-8")
    except OSError:
        said = ""
    pid = said.partition(" ")[0]
    if pid.isdigit() and said == _identity(int(pid)):
        owner = f"process {pid}"
    return UsageError(
        f"the run {path.parent.name} is being written by {owner}",
        f"wait for {owner} to end, or stop it",
    )


def _owner_file(path: Path) -> Path:
    return path.with_suffix(".owner")


def _identity(pid: int) -> str:
    """The process by number and start, which together never repeat while the machine is up."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}\n"
    return f"{pid} {stat.rpartition(')')[2].split()[19]}\n"


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
        "restore journal.jsonl from a backup, or start a new run",
    )
