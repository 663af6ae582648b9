"""What is fuzzed: every reader of profiles, given bytes, ends in a profile or a `UsageError`.

`python tests/support/fuzz_targets.py TARGET [-runs=N] [atheris and libFuzzer options]` fuzzes with
coverage feedback (pip install 'patcher[fuzz]'); `test_fuzz.py` runs a short slice without.
"""

from __future__ import annotations

import gzip
import importlib
import lzma
import os
import pkgutil
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from patcher.bench import PatcherError

DATA = Path(__file__).parents[1] / "data"
SECONDS = 1.0
"""Processor time that no input may take."""
MOST_BYTES = 200_000


def _read(suffix: str) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        path = Path(_scratch.name) / f"input{suffix}"
        path.write_bytes(data)
        _read_path(path)

    return target


def _read_path(path: Path) -> None:
    from patcher.bench import UsageError
    from patcher.hotspot import read

    try:
        profile = read(path, "gpt-oss-20b", force=True)
    except UsageError as error:
        _check_sentence(error)
        return
    assert profile.kernels
    profile.model_dump_json()


def _parquet(data: bytes) -> None:
    """One damaged file among those of a whole export."""
    folder = Path(_scratch.name) / "export"
    if not folder.is_dir():
        shutil.copytree(DATA / "parquet", folder)
    name = ("CUPTI_ACTIVITY_KIND_KERNEL", "StringIds")[len(data) % 2]
    whole = folder / f"{name}.parquet"
    kept = whole.read_bytes()
    whole.write_bytes(data)
    try:
        _read_path(folder)
    finally:
        whole.write_bytes(kept)


def _counters(data: bytes) -> None:
    from patcher.bench import MissingError, UsageError
    from patcher.hotspot.readers.ncu import attach, read_ncu

    path = Path(_scratch.name) / "counters.csv"
    path.write_bytes(data)
    try:
        attach(read_ncu(path), ["gemm"])
    except (UsageError, MissingError) as error:  # a report's first bytes ask for ncu
        _check_sentence(error)


def _check_sentence(error: PatcherError) -> None:
    assert "\n" not in error.message, error.message
    assert error.hint


def _names(data: bytes) -> None:
    from patcher.hotspot.classify import classify
    from patcher.hotspot.names import family, match_key, normalise, printable

    name = data.decode("utf-8", "replace")
    shown = printable(name)
    assert "\x1b" not in shown
    normalise(shown)
    match_key(shown)
    family(shown)
    assert all(classify(shown))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "summary": _read(".txt"),
    "sqlite": _read(".sqlite"),
    "kineto": _read(".json"),
    "kineto-gz": _read(".json.gz"),
    "parquet": _parquet,
    "ncu": _counters,
    "names": _names,
}


def seeds(target: str) -> list[bytes]:
    """Real files to start from, small enough to be worth changing."""
    found = [content for _, content in _files(target)]
    return sorted({content[:MOST_BYTES] for content in found}, key=len)


def _files(target: str) -> Iterator[tuple[Path, bytes]]:
    if target == "names":
        text = gzip.decompress((DATA / "nsys/kernel_names.txt.gz").read_bytes())
        yield from ((DATA, line) for line in text.split(b"\n"))
        return
    folders = {"summary": "nsys", "sqlite": "nsys", "ncu": "ncu", "parquet": "parquet"}
    for path in sorted((DATA / folders.get(target, "kineto")).rglob("*.*")):
        content = path.read_bytes()
        if path.suffix == ".gz" and target != "kineto-gz":
            content = gzip.decompress(content)
        elif path.suffix == ".xz":
            content = lzma.decompress(content)
        is_database = content.startswith(b"SQLite format 3\0")
        if is_database == (target == "sqlite") and path.name != "kernel_names.txt.gz":
            yield path, content


_scratch = tempfile.TemporaryDirectory(prefix="patcher-fuzz-")
_allowed = (_scratch.name, "/dev/", "/proc/")
_watching = False


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
    try:
        yield
    finally:
        _watching, tempfile.tempdir = False, None


def check(target: str, data: bytes) -> None:
    """One input. Raises AssertionError, or whatever the reader lets through."""
    begin = time.process_time()
    with watched():
        TARGETS[target](data)
    spent = time.process_time() - begin
    assert spent < SECONDS, f"{target} took {spent:.1f} s of processor time"


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Changed in a few places: bits, runs, cuts, repeats, and what parsers stumble over."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.randint(1, 200)]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 20))
            case 3:
                data[at:at] = data[at : at + draw.randint(1, 400)] * draw.randint(1, 4)
            case 4:
                data[at:at] = draw.choice(STUMBLES)
            case 5 if draw.random() < 0.3:
                del data[at:]
            case _:
                data[at : at + 8] = draw.randbytes(8)
    return bytes(data[: 2 * MOST_BYTES])


STUMBLES = (
    *(b'"', b",", b"\n", b"\r", b"\t", b"\0", b"\xff", b"(", b"<", b"[", b"{", b"-", b"|"),
    *(b"nan", b"inf", b"1e999", b"-1", b"9" * 400, b"\xef\xbb\xbf", b"\xe2\x80\xa6", b"\x1b[31m"),
    *(b'"ph":"X"', b'"traceEvents"', b"Processing [x", b"Time (%),", b"[" * 2000, b"{" * 2000),
    *(b"(" * 3000, b"<" * 3000, b"," * 5000, b"\xf0\x9f\xa6\x80", b"operator()", b"[lambda("),
    *(b'"cat": "kernel"', b"step[DECODE bs=8]", b"_ZN99", b"unnamed>::", b") lambda(", b": inf,"),
)


def main() -> None:
    import atheris

    target = sys.argv[1]
    with atheris.instrument_imports(include=["patcher"]):
        package = importlib.import_module("patcher.hotspot")
        for module in pkgutil.walk_packages(package.__path__, "patcher.hotspot."):
            importlib.import_module(module.name)  # those that are imported on use, too

    corpus = Path(tempfile.mkdtemp(prefix="patcher-corpus-"))
    for index, content in enumerate(seeds(target)):
        (corpus / str(index)).write_bytes(content)
    kept = f"-artifact_prefix={corpus}/"
    options = [sys.argv[0], str(corpus), f"-max_len={MOST_BYTES}", kept, *sys.argv[2:]]
    atheris.Setup(options, lambda data: check(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
