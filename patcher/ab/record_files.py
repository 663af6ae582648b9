"""Files of records for an A/B, written atomically; damaged ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from patcher.bench import Record, VerificationError, write_atomically
from patcher.runs.durable import held_alone

RecordOfFile = TypeVar("RecordOfFile", bound=Record)


def read_record(path: Path, kind: type[RecordOfFile], hint: str) -> RecordOfFile:
    """Read a record.

    Raises:
        VerificationError: it is damaged; the error has that hint.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise VerificationError(f"{path} is damaged", hint) from error


def write_record(path: Path, record: Record) -> None:
    write_atomically(path, record.model_dump_json())


@contextmanager
def kept_until_done(folder: Path) -> Iterator[Path]:
    """A folder for what takes long to measure: it stays after an error, so that the same command
    goes on, and is removed at the end.

    Raises:
        UsageError: another process measures the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_alone(folder / "lock", "measures the same"):
        yield folder
        shutil.rmtree(folder)
