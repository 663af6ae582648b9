"""The base of every record: frozen, and strict about its fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1
"""Version of everything patcher writes to disk or prints as JSON."""


class Record(BaseModel):
    """A frozen record; an unknown field is an error, so that a misspelt one is never lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")
