"""Any profile that engineers have at hand: told apart by content, not by suffix."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

from patcher.bench import UsageError
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
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
}
MAX_TEXT = 64 << 20
"""A summary has a line a kernel; more than this is something else."""
GIVE = "give an nsys export or summary, or a torch.profiler trace"


def read_recording(path: Path, window: str | None = None) -> Recording:
    """One source, as it is; with `window`, what was launched in NVTX ranges of that text.

    Raises:
        UsageError: missing, empty, cut off, binary, or no profile; one sentence and the fix.
        MissingError: a report needs nsys and none is here.
    """
    try:
        if path.is_dir():
            return read_parquet(path, window)
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
        raise UsageError(f"{path.name} holds single kernels, no run", "give it with --ncu, too")
    for magic, what in ARCHIVES.items():
        if head.startswith(magic):
            raise UsageError(f"{path.name} is {what}", "unpack it and give what is inside")
    if window is not None:
        message = f"{path.name} has no NVTX ranges to cut a window by"
        raise UsageError(message, "give the .sqlite export, or leave --window out")
    text = _unpacked(head)
    if _is_trace(text) or b"Self CPU %" in text:  # a printed key_averages says what to do instead
        return read_kineto(path)
    return read_summary(_text(path), path.name)


def _unpacked(head: bytes) -> bytes:
    """What a gzip begins with; other content as it is."""
    if not head.startswith(GZIP_MAGIC):
        return head
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 1 << 16)
    except zlib.error:
        return b""  # the reader says what is wrong with it


def _is_trace(head: bytes) -> bool:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] in (b"{", b"[") and (b'"traceEvents"' in head or b'"ph"' in head)


def _text(path: Path) -> str:
    text = read_text(path, MAX_TEXT, GIVE)
    if '"Process ID"' in text[:20_000] and '"Kernel Name"' in text[:20_000]:
        raise UsageError(f"{path.name} is Nsight Compute's, of single kernels", "give it as --ncu")
    return text
