"""Read the text of a profile, plain or gzip, or raise the reason why it cannot be read."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path
from typing import BinaryIO

from patcher.bench import UsageError, require_file
from patcher.hotspot.names import printable

GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20
_HEAD = 64
"""Bytes at the beginning, where a text has no zero byte."""


def read_text(path: Path, limit: int, fix: str) -> str:
    """Read and decode a text file.

    Args:
        path: the file.
        limit: maximum size in bytes after decompression.
        fix: how to write the file again; the next step of an error.

    Raises:
        UsageError: the file is missing, a folder, a pipe, a device, empty, binary, truncated, or
            larger than `limit`.
    """
    raw = _content(path, limit, fix)
    if b"\0" in raw:
        raise UsageError(f"{path.name} is a binary file", fix)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not UTF-8 text", fix) from None


def read_damaged_text(path: Path, limit: int, fix: str) -> tuple[str, str | None]:
    """Read a text file like `read_text`, and replace what is no text in it.

    Returns:
        The text, and what was replaced; None if nothing was.

    Raises:
        UsageError: as `read_text`, and if the file is binary from its beginning.
    """
    raw = _content(path, limit, fix)
    if b"\0" in raw[:_HEAD]:
        raise UsageError(f"{path.name} is a binary file", fix)
    replaced = "zero bytes" if b"\0" in raw else None
    raw = raw.replace(b"\0", b" ")
    try:
        return raw.decode("utf-8-sig"), replaced
    except UnicodeDecodeError:
        return raw.decode("utf-8-sig", "replace"), "bytes that are not UTF-8"


def _content(path: Path, limit: int, fix: str) -> bytes:
    """The unpacked bytes of a file that is not empty; UTF-16 becomes UTF-8."""
    try:
        require_file(path)
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            raw = _read(gzip.GzipFile(fileobj=file) if head == GZIP_MAGIC else file, limit)
    except IsADirectoryError:
        raise UsageError(f"{path.name} is a folder", "give one file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UsageError(f"{path.name} is a truncated or damaged gzip file", fix) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a profile") from error
    if raw is None:
        unpacked = " after decompression" if head == GZIP_MAGIC else ""
        raise UsageError(f"{path.name} is larger than {limit >> 20} MB{unpacked}", fix)
    if not raw.strip():
        raise UsageError(f"{path.name} is empty", fix)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # PowerShell's `>`
        raw = raw.decode("utf-16", "replace").encode()
    return raw


def first_line(error: Exception) -> str:
    """The first line of a library's error, short enough for a sentence."""
    return printable(str(error).split("\n")[0][:200])


def _read(stream: gzip.GzipFile | BinaryIO, limit: int) -> bytes | None:
    """Read a stream; None if it exceeds the limit, since a small gzip may hold terabytes."""
    pieces: list[bytes] = []
    left = limit
    while piece := stream.read(_PIECE):
        left -= len(piece)
        if left < 0:
            return None
        pieces.append(piece)
    return b"".join(pieces)
