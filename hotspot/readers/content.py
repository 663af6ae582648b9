"""The text of a profile, plain or gzip, or the reason why it cannot be had."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path
from typing import BinaryIO

from patcher.bench import UsageError
from patcher.hotspot.names import printable

GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20


def read_text(path: Path, limit: int, fix: str) -> str:
    """The decoded file; `limit` is in bytes and counts what comes out of a gzip.

    Raises:
        UsageError: missing, a folder, empty, binary, cut off, or more than `limit`; `fix` says how
            to write it again.
    """
    try:
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            raw = _read(gzip.GzipFile(fileobj=file) if head == GZIP_MAGIC else file, limit)
    except IsADirectoryError:
        raise UsageError(f"{path.name} is a folder", "give one file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UsageError(f"{path.name} is a gzip file that is cut off or damaged", fix) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a profile") from error
    if raw is None:
        size = f"{limit >> 20} MB"
        raise UsageError(f"{path.name} is larger than {size} when it is unpacked", fix)
    if not raw.strip():
        raise UsageError(f"{path.name} is empty", fix)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # PowerShell's `>`
        raw = raw.decode("utf-16", "replace").encode()
    if b"\0" in raw:
        raise UsageError(f"{path.name} is a binary file", fix)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is no UTF-8 text", fix) from None


def first_line(error: Exception) -> str:
    """What a library says of a file, as much as fits into a sentence."""
    return printable(str(error).split("\n")[0][:200])


def _read(stream: gzip.GzipFile | BinaryIO, limit: int) -> bytes | None:
    """All of it, or None where it is more than the limit: a small gzip may hold terabytes."""
    pieces: list[bytes] = []
    left = limit
    while piece := stream.read(_PIECE):
        left -= len(piece)
        if left < 0:
            return None
        pieces.append(piece)
    return b"".join(pieces)
