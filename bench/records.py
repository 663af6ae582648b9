"""The base of every record: frozen, and strict about its fields."""

from __future__ import annotations

import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from patcher.bench.errors import UsageError

SCHEMA_VERSION = 1
"""Version of everything patcher writes to disk or prints as JSON."""
MOST_BYTES = 256 << 20
"""Of a compressed file of records when it is unpacked."""


class Record(BaseModel):
    """A frozen record; an unknown field is an error, so that a misspelt one is never lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Found = TypeVar("Found", bound=Record)


def remembered(path: Path, kind: type[Found], find: Callable[[], Found]) -> Found:
    """The record that the file holds, or what is found now, which it holds from then on."""
    if path.is_file():
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    found = find()
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(found.model_dump_json(), encoding="utf-8")
    staged.replace(path)
    return found


def content(path: Path) -> bytes:
    """The bytes of a file of records; a file named `*.xz` is decompressed.

    Raises:
        OSError: the file cannot be read.
        UsageError: an xz file is damaged, cut off, or unpacks to more than `MOST_BYTES`.
    """
    if path.suffix != ".xz":
        return path.read_bytes()
    try:
        with lzma.open(path) as file:
            found = file.read(MOST_BYTES + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise UsageError(
            f"{path.name} is a damaged xz file, or is cut off", "restore it from a copy"
        ) from error
    if len(found) > MOST_BYTES:
        raise UsageError(
            f"{path.name} unpacks to more than {MOST_BYTES >> 20} MiB", "give a smaller file"
        )
    return found
