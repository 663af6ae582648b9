"""What is fuzzed: every reader of profiles, given bytes, ends in a profile or a `UsageError`.

`python tests/support/fuzz_targets.py TARGET [-runs=N] [atheris and libFuzzer options]` fuzzes with
coverage feedback (pip install 'patcher[fuzz]'); with a plain number in place of options it tries
so many seeded inputs without, which is faster; `test_fuzz.py` does so with a few.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.metadata
import json
import os
import pkgutil
import random
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from fuzz_changes import (
    MOST_BYTES,
    changed_cells,
    changed_database,
    changed_packed_trace,
    changed_parquet,
    changed_trace,
    damaged,
)
from nsys_sample import ARCHIVE, printed
from traces_sample import STEP, Export, call, kernel, mark, steps, two_ranks, write_trace

from patcher.bench import PatcherError

DATA = Path(__file__).parents[1] / "data"
NAMES = DATA / "nsys/kernel_names.txt.gz"
SECONDS = 1.0
"""Processor time that no input may take."""
SEED_BYTES = 60_000
"""Larger files are cut to a few rows: a thousand small inputs find more than ten large ones."""
WINDOWS = (*[None] * 6, "all", "step", "ProfilerStep#1", "%")


def _read(suffix: str) -> Callable[[bytes], bool]:
    def target(data: bytes) -> bool:
        path = Path(_scratch.name) / f"input{suffix}"
        path.write_bytes(data)
        return _read_path(path, data)

    return target


def _read_path(path: Path, data: bytes) -> bool:
    """Whether it is a profile; what it is read with depends on its bytes."""
    from fuzz_profiles import check_profile  # what it imports must be instrumented first

    from patcher.bench import UsageError
    from patcher.hotspot import read

    draw = random.Random(zlib.crc32(data))
    window, steps = draw.choice(WINDOWS), draw.choice((None, None, None, 1, 7))
    try:
        profile = read(path, "gpt-oss-20b", force=True, window=window, steps=steps)
    except UsageError as error:
        _check_sentence(error)
        return False
    assert profile.kernels
    check_profile(profile, drawn=draw.random() < 0.005)
    return True


def _parquet(data: bytes) -> bool:
    """One damaged file among those of a whole export."""
    folder = Path(_scratch.name) / "export"
    if not folder.is_dir():
        shutil.copytree(DATA / "parquet", folder)
    name = ("CUPTI_ACTIVITY_KIND_KERNEL", "StringIds")[len(data) % 2]
    whole = folder / f"{name}.parquet"
    kept = whole.read_bytes()
    whole.write_bytes(data)
    try:
        return _read_path(folder, data)
    finally:
        whole.write_bytes(kept)


def _counters(data: bytes) -> bool:
    from patcher.bench import MissingError, UsageError
    from patcher.hotspot.readers.ncu import attach, read_ncu

    path = Path(_scratch.name) / "counters.csv"
    path.write_bytes(data)
    try:
        attach(read_ncu(path), ["gemm"])
    except (UsageError, MissingError) as error:  # a report's first bytes ask for ncu
        _check_sentence(error)
        return False
    return True


def _check_sentence(error: PatcherError) -> None:
    assert "\n" not in error.message, error.message
    assert error.hint


def _names(data: bytes) -> bool:
    from patcher.hotspot.classify import classify
    from patcher.hotspot.names import family, match_key, normalise, printable

    name = data.decode("utf-8", "replace")
    shown = printable(name)
    assert "\x1b" not in shown
    normalise(shown)
    match_key(shown)
    family(shown)
    assert all(classify(shown))
    return True


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "summary": _read(".txt"),
    "sqlite": _read(".sqlite"),
    "kineto": _read(".json"),
    "kineto-gz": _read(".json.gz"),
    "parquet": _parquet,
    "ncu": _counters,
    "names": _names,
}


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "summary": changed_cells,
    "sqlite": changed_database,
    "kineto": changed_trace,
    "kineto-gz": changed_packed_trace,
    "parquet": changed_parquet,
    "ncu": changed_cells,
}


def seeds(target: str) -> list[bytes]:
    """Real files to start from and built ones, small enough to be worth changing."""
    found = [content for _, content in _files(target)]
    if target in ("sqlite", "kineto", "kineto-gz"):
        found = [*map(_few_events if "k" in target else _few_rows, found), *_built(target)]
    return sorted(set(found), key=len)


def _few_rows(content: bytes) -> bytes:
    """A database with a few rows of each table."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(content)
        named = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'StringIds'"
        for (table,) in database.execute(named).fetchall():
            database.execute(
                f"DELETE FROM {table} WHERE rowid > (SELECT MIN(rowid) + 60 FROM {table})"
            )
        database.commit()
        database.execute("VACUUM")
        return bytes(database.serialize())


def _few_events(content: bytes) -> bytes:
    """A trace with a few events."""
    packed = content.startswith(b"\x1f\x8b")
    text = gzip.decompress(content) if packed else content
    if len(text) > SEED_BYTES and text.lstrip()[:1] == b"{":
        trace = json.loads(text)
        trace["traceEvents"] = trace["traceEvents"][:150]
        text = json.dumps(trace).encode()
    return gzip.compress(text, 1, mtime=0) if packed else text


def _built(target: str) -> Iterator[bytes]:
    """Several devices, processes and ranges, which no small real file has."""
    folder = Path(_scratch.name)
    if target == "sqlite":
        export = Export(folder / "built.sqlite")
        for process, device in ((77, 0), (88, 0), (99, 1)):
            export.range("step", 0, 90_000, process)
            for at, (text, spent_us) in enumerate(STEP * 2):
                start, where = 10_000 * at + 50, {"process": process, "device": device}
                export.launch(
                    text, start, int(99 * spent_us), at=start - 40, correlation=at, **where
                )
        export.add("TARGET_INFO_CUDA_DEVICE", (1, 0, 77), (2, 0, 88))
        found = [export.done(), two_ranks(folder / "ranks.sqlite")]
    else:
        names = ("ProfilerStep#1", "ProfilerStep#2", "step[DECODE bs=4]")
        ranks = [steps(names, pid=5 + r, device_pid=r, device=r, late=700.0 * r) for r in (0, 1)]
        events = [kernel("k", 0, 0), call(5, 3), mark("m", 5, -1.0), *ranks[0], *ranks[1]]
        found = [write_trace(folder / "built.json", events)]
    for path in found:
        content = path.read_bytes()
        path.unlink()
        yield gzip.compress(content, 1, mtime=0) if target.endswith("gz") else content


def _files(target: str) -> Iterator[tuple[Path, bytes]]:
    if target == "names":
        text = gzip.decompress(NAMES.read_bytes())
        yield from ((DATA, line) for line in text.split(b"\n"))
        return
    folders = {"summary": "nsys", "sqlite": "nsys", "ncu": "ncu", "parquet": "parquet"}
    for path in sorted((DATA / folders.get(target, "kineto")).rglob("*.*")):
        content = path.read_bytes()
        if path.suffix == ".gz" and target != "kineto-gz":
            content = gzip.decompress(content)
        is_database = content.startswith(b"SQLite format 3\0")
        if is_database == (target == "sqlite") and path not in (ARCHIVE, NAMES):
            yield path, content
    if target == "summary":
        printed_files = (item for item in printed().items() if not item[0].endswith(".sql"))
        yield from ((DATA / name, content) for name, content in printed_files)


_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # disks are slower than readers
_scratch = tempfile.TemporaryDirectory(prefix="patcher-fuzz-", dir=_memory)
_allowed = (_scratch.name, "/dev/", "/proc/")
_watching = False
_entry_points = cache(importlib.metadata.entry_points)
"""What is installed stays so; to look takes longer than to read a small profile."""


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    """No file outside the scratch folder is opened for writing, removed or renamed."""
    if not _watching:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        touched = [path] if writes or (isinstance(mode, str) and set(mode) & set("wax+")) else []
    elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree"):
        # inside a folder that is open: an emptied temporary folder
        held = any(isinstance(each, int) and each >= 0 for each in arguments[1:])
        touched = [] if held else list(arguments[:1])
    else:
        return
    for path in touched:
        if isinstance(path, str | os.PathLike) and not str(path).startswith(_allowed):
            raise AssertionError(f"{event} touches {path}")


sys.addaudithook(_watch)


@contextmanager
def watched() -> Iterator[None]:
    global _watching
    _watching, tempfile.tempdir = True, _scratch.name
    whole, importlib.metadata.entry_points = importlib.metadata.entry_points, _entry_points
    try:
        yield
    finally:
        _watching, tempfile.tempdir = False, None
        importlib.metadata.entry_points = whole


def check(target: str, data: bytes) -> bool:
    """One input: whether something was read. Raises AssertionError, or whatever the reader lets
    through."""
    begun_s = time.perf_counter()
    with watched():
        done = TARGETS[target](data)
    if time.perf_counter() - begun_s > SECONDS:  # others may have had the processor
        begun_s = time.process_time()
        with watched():
            TARGETS[target](data)
        spent_s = time.process_time() - begun_s
        assert spent_s < SECONDS, f"{target} took {spent_s:.1f} s of processor time"
    return done


def changed(target: str, content: bytes, draw: random.Random) -> bytes:
    """Changed as the target's format has it, in bytes, or both."""
    how = draw.random()
    change = CHANGES.get(target)
    if change and how < 0.85:
        content = change(content, draw)
    return damaged(content, draw) if how > 0.75 or not change else content


def try_many(target: str, count: int, first: int = 0) -> None:
    """Try inputs by their seeds; one that fails is kept beside the corpus."""
    content, begun_s, profiles = seeds(target), time.monotonic(), 0
    for seed in range(first, first + count):
        draw = random.Random(seed)
        data = changed(target, draw.choice(content), draw)
        try:
            profiles += check(target, data)
        except BaseException:
            kept = Path(tempfile.mkdtemp(prefix="patcher-crash-")) / f"{target}-{seed}"
            kept.write_bytes(data)
            print(f"{target}, seed {seed}: {kept}", flush=True)
            raise
        if (tried := seed - first + 1) % 10_000 == 0 or tried == count:
            spent_s = time.monotonic() - begun_s
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            done = f"{tried:,} inputs, {profiles:,} of them profiles"
            print(f"{target}: {done}, {spent_s:.0f} s, peak {peak} MiB", flush=True)


def main() -> None:
    """Fuzz one target."""
    target, *options = sys.argv[1:]
    if options and options[0].isdigit():
        try_many(target, *map(int, options))
        return
    import atheris

    with atheris.instrument_imports(include=["patcher.hotspot"]):
        package = importlib.import_module("patcher.hotspot")
        for module in pkgutil.walk_packages(package.__path__, "patcher.hotspot."):
            importlib.import_module(module.name)  # those that are imported on use, too

    corpus = Path(tempfile.mkdtemp(prefix="patcher-corpus-"))
    for index, content in enumerate(seeds(target)):
        (corpus / str(index)).write_bytes(content)
    kept = f"-artifact_prefix={corpus}/"

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        new = changed(target, data, draw) if draw.random() < 0.7 else atheris.Mutate(data, most)
        return bytes(new[:most])

    atheris.Setup(
        [sys.argv[0], str(corpus), f"-max_len={MOST_BYTES}", kept, *options],
        lambda data: check(target, data) and None,
        custom_mutator=mutated,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
