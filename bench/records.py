"""Base class of all records, and helpers to read and cache them."""

from __future__ import annotations

import io
import json
import lzma
import os
import secrets
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from patcher.bench.errors import UsageError

SCHEMA_VERSION = 1
"""Schema version of everything patcher writes to disk or prints as JSON."""
MOST_BYTES = 256 << 20
"""Size limit in bytes of a file of records, after decompression."""
MOST_SOURCE = 4 << 20
"""Size limit in bytes of a source file."""


class Record(BaseModel):
    """A frozen pydantic model. An unknown field is an error, so that misspelt ones are noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        tomllib.TOMLDecodeError: it is none, is nested too deeply, or has too long a number.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("the document is nested too deeply") from None
    except ValueError as error:
        raise tomllib.TOMLDecodeError(str(error)) from None


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it is none, is nested too deeply, or has too long a number.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the document is nested too deeply") from None


def first_error(error: ValidationError) -> tuple[tuple[str | int, ...], str, Any]:
    """The first of several errors.

    Returns:
        The field and what is inside it, what is wrong, and the value.
    """
    first = error.errors()[0]
    return first["loc"], first["msg"].removeprefix("Value error, "), first["input"]


def problem(error: Exception) -> str:
    """An error as one phrase; a validation error as `FIELD: what is wrong` of the first field."""
    if not isinstance(error, ValidationError):
        return str(error)
    where, wrong, _ = first_error(error)
    return ": ".join(filter(None, (".".join(map(str, where)), wrong)))


def obstacle(folder: Path) -> Path | None:
    """Return the file in the place of a folder or of one of its parents, or None."""
    whole = folder.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.exists(each))
    return None if os.path.isdir(there) else there


AnyRecord = TypeVar("AnyRecord", bound=Record)


def remembered(path: Path, kind: type[AnyRecord], measure: Callable[[], AnyRecord]) -> AnyRecord:
    """Load a record from a cache file, or measure it and write the file.

    Args:
        path: the cache file, JSON.
        kind: class of the record.
        measure: computes the record if the file does not exist.
    """
    if path.is_file():
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    record = measure()
    write_atomically(path, record.model_dump_json())
    return record


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that others see all of it or nothing, also of several that write it at once;
    its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        staged.write_bytes(data.encode() if isinstance(data, str) else data)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)  # half a file would fill a full disk
        raise


def require_file(path: Path) -> None:
    """Refuse pipes and devices, which may never end; a folder is left to the reader's own error.

    Raises:
        OSError: there is no such path.
        UsageError: the path is a pipe, a device or a socket.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(
            f"{path} is a pipe or a device, not a file", "write its content to a file first"
        )


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be read.
        UsageError: it is no regular file, or it is larger.
    """
    require_file(path)
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UsageError(f"{path} is larger than {limit >> 20} MiB", "give a smaller file")
    return data


def read_source(path: Path, limit: int = MOST_SOURCE) -> str:
    """Read a regular UTF-8 text file; line ends become newlines. See `read_file`."""
    return io.TextIOWrapper(io.BytesIO(read_file(path, limit)), encoding="utf-8").read()


def content(path: Path) -> bytes:
    """Read a file of records, decompressing it if it is named `*.xz`.

    Args:
        path: the file.

    Returns:
        The decompressed bytes.

    Raises:
        OSError: the file cannot be read.
        UsageError: no regular file, one of more than `MOST_BYTES`, unpacked where it is an xz file,
            or an xz file that is damaged or truncated.
    """
    if path.suffix != ".xz":
        return read_file(path, MOST_BYTES)
    require_file(path)
    try:
        with lzma.open(path) as file:
            data = file.read(MOST_BYTES + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise UsageError(
            f"{path.name} is a damaged xz file, or is cut off", "restore it from a copy"
        ) from error
    if len(data) > MOST_BYTES:
        raise UsageError(
            f"{path.name} unpacks to more than {MOST_BYTES >> 20} MiB", "give a smaller file"
        )
    return data
