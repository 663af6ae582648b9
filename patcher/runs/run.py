"""A run: a folder with its configuration, its journal and its artefacts as plain files.

A step with a deterministic name is done once: `Run.step` gives the stored record back when the
journal holds its result. Resuming is therefore running the same function again.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from patcher.bench import (
    SCHEMA_VERSION,
    PatcherError,
    Record,
    UsageError,
    VerificationError,
    Workload,
)
from patcher.runs import durable
from patcher.runs import folders as run_folders
from patcher.runs.journal import (
    START_OVER,
    Event,
    Journal,
    State,
    fold,
    is_written,
    read_events,
)

RecordT = TypeVar("RecordT", bound=BaseModel)
JOURNAL = "journal.jsonl"
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


class RunConfig(Record):
    """`run.json`: what was asked for. Holds no secret, no environment and no path outside the
    run."""

    schema_version: int = SCHEMA_VERSION
    id: str
    created: str
    """ISO 8601, UTC."""
    command: str
    """The command that began the run: `run`, `optimize`, `demo`."""
    model: str | None
    """The served model."""
    workload: Workload | None
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, str] | None = None
    """What its figures depend on: see `patcher.bench.machine.environment.facts`."""


def journal_name(record_type: type[BaseModel]) -> str:
    """What the journal calls a kind of record: its class, unless the class was renamed since and
    says in `recorded_as` what it was."""
    return str(getattr(record_type, "recorded_as", record_type.__name__))


class Run:
    """One folder `patcher-runs/<id>/`. Only one process writes it at a time; it is a context
    manager."""

    def __init__(self, path: Path, config: RunConfig, journal: Journal | None) -> None:
        self.path = path
        self.config = config
        self._journal = journal

    @classmethod
    def create(
        cls,
        root: Path,
        *,
        command: str,
        model: str | None = None,
        workload: Workload | None = None,
        settings: dict[str, Any] | None = None,
        versions: dict[str, str] | None = None,
        machine: dict[str, str] | None = None,
    ) -> Run:
        """Make the folder `root/<id>` and open it for writing; the id is date-time, model and a
        random part."""
        now = datetime.now(UTC)
        slug = re.sub(r"[^a-z0-9]+", "-", (model or command).rsplit("/", 1)[-1].lower()).strip("-")[
            :40
        ]
        config = RunConfig(
            id=f"{now:%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(2)}",
            created=now.isoformat(timespec="seconds"),
            command=command,
            model=model,
            workload=workload,
            settings=settings or {},
            versions=versions or {},
            machine=machine,
        )
        path = root / config.id
        durable.make_folder(root)
        path.mkdir()  # never another run's
        durable.sync_folder(root)
        text = _json(config)
        durable.write_whole(path / "run.json", text)
        run = cls(path, config, Journal(path / JOURNAL))
        run.note("run", created=config.id, config_digest=_digest(text))
        return run

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Run:
        """Open an existing run; `read_only` takes no lock, so that a run can be looked at while it
        goes on.

        Raises:
            UsageError: not a run, or another process is writing it.
            VerificationError: the journal or the configuration was changed.
        """
        try:
            text = (path / "run.json").read_text(encoding="utf-8")
            config = RunConfig.model_validate_json(text)
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise UsageError(f"{path} is not a run", "give a run's folder or id") from error
        run = cls(path, config, None if read_only else Journal(path / JOURNAL))
        try:
            run._verify_config(text)
        except BaseException:
            run.close()
            raise
        return run

    list = staticmethod(run_folders.every)
    latest = staticmethod(run_folders.latest)
    find = staticmethod(run_folders.find)

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def events(self) -> Sequence[Event]:
        """Every event so far; read from the disk when the run is open read-only."""
        if self._journal:
            return self._journal.events
        path = self.path / JOURNAL
        return read_events(path) if path.exists() else ()  # killed before its first line

    @property
    def read_only(self) -> bool:
        return self._journal is None

    @property
    def written(self) -> bool:
        """Whether a process works on this run now, this one or another."""
        return self._journal is not None or is_written(self.path / JOURNAL)

    @property
    def state(self) -> State:
        return fold(self.events)

    def done(self, name: str) -> bool:
        """Whether the step has a result."""
        return name in self.state.results

    def step(
        self, name: str, function: Callable[[], RecordT], record_type: type[RecordT]
    ) -> RecordT:
        """The record of the step `name`: stored, or made now by calling `function` once.

        An expected error (`PatcherError`) is noted and goes through; the step stays open and is
        tried again when the run is resumed.

        Raises:
            VerificationError: the stored artefact is missing, was changed, or is not such a record.
        """
        journal = self._writer()
        if not _NAME.fullmatch(name) or ".." in name:
            raise ValueError(f"not a step name: {name!r}")
        state = self.state
        file = f"steps/{name}.json"
        if name in state.results:
            return self.load(name, record_type)
        if name in state.pending and (text := self._left_behind(file, record_type)) is not None:
            record = _parse(text, record_type, name)
            journal.append("result", name, {**_result(file, text, record_type), "recovered": True})
            return record
        durable.remove(self.path / file)
        durable.make_folder((self.path / file).parent)  # now: a reply goes to the disk at once
        journal.append("intent", name, {"record": journal_name(record_type)})
        try:
            record = function()
        except PatcherError as error:
            # The kind alone: a message may name paths of this machine.
            journal.append("note", name, {"error": error.kind})
            raise
        text = _json(record)
        # What is given back now is what a resumed run will read; a record that JSON cannot hold
        # (an infinity) is found here, not then.
        record = record_type.model_validate_json(text)
        self.write(file, text)
        journal.append("result", name, _result(file, text, record_type))
        return record

    def _left_behind(self, file: str, record_type: type[BaseModel]) -> str | None:
        """The artefact of a step that was killed before its result: never pay twice.

        It belongs to the open intent, as stale ones are removed before an intent. One that was not
        renamed into place yet is good if it is whole.
        """
        path = self.path / file
        if not path.is_file():
            try:
                text = durable.temporary_of(path).read_text(encoding="utf-8")
                record_type.model_validate_json(text)
            except (OSError, UnicodeDecodeError, ValidationError):
                return None
            if not text.endswith("\n"):
                return None
            durable.adopt(path)
        return path.read_text(encoding="utf-8")

    def load(self, name: str, record_type: type[RecordT]) -> RecordT:
        """The stored record of a finished step.

        Raises:
            UsageError: the step has no result.
            VerificationError: its artefact is missing, was changed, or is not such a record.
        """
        data = self.state.results.get(name)
        if data is None:
            raise UsageError(
                f"step {name} of run {self.id} is not done", f"patcher resume {self.id}"
            )
        try:
            text = (self.path / data["file"]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise VerificationError(
                f"the artefact of step {name} cannot be read", _RESTORE
            ) from error
        if _digest(text) != data["digest"]:
            raise VerificationError(
                f"the artefact of step {name} was changed after it was written", _RESTORE
            )
        return _parse(text, record_type, name)

    def start_over(self, machine: dict[str, str], kept: Iterable[type[BaseModel]]) -> None:
        """From now on only results of these kinds count; all others are made again, on this
        machine."""
        names = [journal_name(kind) for kind in kept]
        self.note(START_OVER, machine=machine, kept=names)

    def note(self, subject: str, /, **data: Any) -> Event:
        """Add a remark to the journal."""
        return self._writer().append("note", subject, data)

    def write(self, path: str, text: str) -> None:
        """Write an artefact that a person can open, atomically; the same text again leaves the file
        alone."""
        self._writer()
        target = (self.path / path).resolve()
        if not target.is_relative_to(self.path.resolve()):
            raise ValueError(f"outside the run: {path}")
        if not (target.is_file() and target.read_bytes() == text.encode()):
            durable.make_folder(target.parent)
            durable.write_whole(target, text)

    def close(self) -> None:
        """Release the run's lock. Closing twice is the same as once."""
        if self._journal:
            self._journal.close()
            self._journal = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _writer(self) -> Journal:
        if self._journal is None:
            raise ValueError(f"run {self.id} is open read-only")
        return self._journal

    def _verify_config(self, text: str) -> None:
        created = [event for event in self.events if event.kind == "note" and event.step == "run"]
        if not created:
            if self._journal is None:
                return  # a run that is just being created
            self.note(
                "run", created=self.id, config_digest=_digest(text)
            )  # killed before its first line
        elif created[0].data.get("config_digest") != _digest(text):
            raise VerificationError(
                f"run.json of run {self.id} was changed after it was written", _RESTORE
            )


_RESTORE = "restore the file from a backup, or start a new run"


def _result(file: str, text: str, record_type: type[BaseModel]) -> dict[str, Any]:
    return {"file": file, "digest": _digest(text), "record": journal_name(record_type)}


def _parse(text: str, record_type: type[RecordT], name: str) -> RecordT:
    try:
        return record_type.model_validate_json(text)
    except ValidationError as error:
        raise VerificationError(
            f"the artefact of step {name} is no {record_type.__name__}", _RESTORE
        ) from error


def _json(record: BaseModel) -> str:
    return (
        json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
