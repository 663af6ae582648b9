"""Files of records for an A/B, written atomically; damaged ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from patcher.bench import Record, VerificationError

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
    half = path.with_suffix(".part")
    half.write_text(record.model_dump_json(), encoding="utf-8")
    half.replace(path)
