"""Read any common profile format; the format is recognised by content, not by suffix."""

from __future__ import annotations

import codecs
import tempfile
import zlib
from pathlib import Path

from patcher.bench import UsageError, require_file
from patcher.hotspot.nsys import export_sqlite
from patcher.hotspot.readers.content import GZIP_MAGIC, read_text
from patcher.hotspot.readers.kineto import read_kineto
from patcher.hotspot.readers.parquet import read_parquet
from patcher.hotspot.readers.sqlite import HINT, read_sqlite
from patcher.hotspot.readers.summary import read_summary
from patcher.hotspot.recording import Recording

SQLITE_MAGIC = b"SQLite format 3\0"
ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"BZh": "a bzip2 archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x50\x2a\x4d\x18": "a zstd archive",  # a frame that is skipped comes first
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "an lz4 archive",
}
OTHER_EXPORTS = {b"\x89HDF\r\n": "an HDF5 export", b"ARROW1": "an Arrow export"}
"""Of nsys, too."""
_PACKED = (SQLITE_MAGIC, GZIP_MAGIC, *ARCHIVES, *OTHER_EXPORTS)
_TRACE_WORDS = (b'"traceEvents"', b'"ph"', b'"schemaVersion"', b'"deviceProperties"')
"""In the first part of a trace; what is told of a large job may come before its events."""
MAX_TEXT = 64 << 20
"""Bytes. A summary has one line per kernel, so a larger text is something else."""
GIVE = "give an nsys export or summary, or a torch.profiler trace"


def read_recording(path: Path, window: str | None = None) -> Recording:
    """Read one source.

    Args:
        path: a file, or the folder of a Parquet export.
        window: the text of NVTX ranges; only kernels launched inside them are read.

    Raises:
        UsageError: the file is missing, empty, truncated, binary, or no profile.
        MissingError: a report needs nsys, which is not installed.
    """
    try:
        if path.is_dir():
            return read_parquet(path, window)
        require_file(path)
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", GIVE) from error
    if not head:
        raise UsageError(f"{path.name} is empty", f"write it again: {HINT}")
    if head.startswith(SQLITE_MAGIC):
        return read_sqlite(path, window)
    if path.suffix in (".nsys-rep", ".qdrep"):
        with tempfile.TemporaryDirectory() as scratch:
            exported = export_sqlite(path, Path(scratch) / f"{path.stem}.sqlite")
            return read_sqlite(exported, window)
    if path.suffix == ".ncu-rep":
        raise UsageError(
            f"{path.name} is a report of single kernels, not of a run",
            "pass it to --ncu, with a profile of the run to --from",
        )
    for magic, what in ARCHIVES.items():
        if head.startswith(magic):
            raise UsageError(f"{path.name} is {what}", "unpack it and give the file inside")
    for magic, what in OTHER_EXPORTS.items():
        if head.startswith(magic):
            raise UsageError(f"{path.name} is {what}, which is not read", f"give {HINT}")
    text = _decompress(head)
    if text is not head and any(text.startswith(magic) for magic in _PACKED):
        raise UsageError(
            f"{path.name} is a gzip of a file that is not text",
            "unpack it and give the file inside",
        )
    if b'"CudaEvent":' in text or (b'"id":' in text[:20] and b'"value":' in text[:200]):
        raise UsageError(
            f"{path.name} is an export as lines of JSON, which is not read", f"give {HINT}"
        )
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = text.decode("utf-16", "replace").encode()
    if _is_trace(text) or b"Self CPU %" in text:  # read_kineto explains a printed key_averages
        return read_kineto(path, window)
    if window is not None:
        message = f"{path.name} has no NVTX ranges to cut a window by"
        raise UsageError(message, "give the .sqlite export, or omit --window")
    return read_summary(_text(path), path.name)


def _decompress(head: bytes) -> bytes:
    """The beginning of a gzip's content; other content unchanged."""
    if not head.startswith(GZIP_MAGIC):
        return head
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 1 << 16)
    except zlib.error:
        return b""  # the reader reports the damage


def _is_trace(head: bytes) -> bool:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] in (b"{", b"[") and any(word in head for word in _TRACE_WORDS)


def _text(path: Path) -> str:
    text = read_text(path, MAX_TEXT, GIVE)
    if '"Process ID"' in text[:20_000] and '"Kernel Name"' in text[:20_000]:
        raise UsageError(
            f"{path.name} is Nsight Compute's page of single kernels", "pass it to --ncu"
        )
    return text
