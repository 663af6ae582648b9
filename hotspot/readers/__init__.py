"""Any profile that engineers have at hand: told apart by content, not by suffix."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

from bench import UsageError
from hotspot.nsys import export_sqlite
from hotspot.profile import Profile, ProfileWarning
from hotspot.rank import build_profile
from hotspot.readers.content import GZIP_MAGIC, read_text
from hotspot.readers.kineto import read_kineto
from hotspot.readers.ncu import Attached, attach, read_ncu
from hotspot.readers.parquet import read_parquet
from hotspot.readers.sqlite import HINT, NODE_LEVEL, read_sqlite
from hotspot.readers.summary import read_summary
from hotspot.recording import Recording
from hotspot.roofline import Served
from hotspot.stats import EVERYTHING
from hotspot.subtract import subtract

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


def read(
    path: Path,
    model: str,
    *,
    window: str | None = None,
    minus: Path | None = None,
    ncu: Path | None = None,
    batch: int | None = None,
    steps: int | None = None,
    force: bool = False,
) -> Profile:
    """Read and rank a profile.

    Args:
        model: a preset's name tells layers and sizes; any other name is just kept.
        window: text of an NVTX range, or `all` to keep warm-up and loading.
        minus: a profile of the same run with fewer tokens, whose kernels are taken off.
        ncu: Nsight Compute's counters for the same kernels: a report, or its csv.
        batch: sequences in a decode step; the preset's by default.
        steps: decode steps in it, where it cannot tell.
        force: rank a trace that hides kernels, under a warning.

    Raises:
        UsageError: missing, empty, cut off, binary, hiding kernels, or another report; one
            sentence and the fix.
        MissingError: a report needs nsys or ncu and none is here.
    """
    chosen = None if window == EVERYTHING else window
    served = Served.of(model, batch)
    recording = _shown(read_recording(path, chosen), path.name, served, force)
    if minus is not None:
        recording = subtract(
            recording, _shown(read_recording(minus, chosen), minus.name, served, force)
        )
    names = _names(recording)
    counters = Attached({}, ()) if ncu is None else attach(read_ncu(ncu), names)
    profile = build_profile(
        recording, model, served=served, steps=steps, counters=counters.counters, window=window
    )
    return profile.model_copy(update={"warnings": (*profile.warnings, *counters.warnings)})


def read_recording(path: Path, window: str | None = None) -> Recording:
    """One source, as it is. Raises like `read`."""
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
    if _is_trace(_unpacked(head)):
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


def _shown(recording: Recording, name: str, served: Served, force: bool) -> Recording:
    """Refuse what hides kernels; with `force`, warn.

    Raises:
        UsageError: a graph-level trace, by what the source says or by what is missing in it.
    """
    hidden = recording.hidden or _suspicion(recording, served)
    if hidden is None:
        return recording
    what = f"{name}: {hidden}, so the kernels inside them are missing"
    if not force:
        raise UsageError(what, f"profile again: {NODE_LEVEL}   (or rank what is there: --force)")
    warning = ProfileWarning(kind="graph_level", message=f"{what}; profile again: {NODE_LEVEL}")
    return Recording(**{**vars(recording), "warnings": (*recording.warnings, warning)})


def _suspicion(recording: Recording, served: Served) -> str | None:
    """A summary of a model of many layers in which nothing runs once a layer."""
    if not recording.rows or not served.layers:
        return None
    whole = sum(row.total_ns for row in recording.rows)
    often = [row.instances for row in recording.rows if row.total_ns > 1e-3 * whole]
    if max(often) >= served.layers * min(often):
        return None
    return (
        f"no kernel runs {served.layers} times as often as another, though the model has "
        f"{served.layers} layers: CUDA graphs seem to have been traced as a whole"
    )


def _names(recording: Recording) -> list[str]:
    if recording.launches is not None:
        return list(recording.launches.texts)
    return [row.name for row in recording.rows]
