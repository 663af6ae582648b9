"""The base of every record: frozen, and strict about its fields."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1
"""Version of everything patcher writes to disk or prints as JSON."""


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
