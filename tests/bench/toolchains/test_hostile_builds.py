"""A build that runs the candidate's code: what it leaves in its folder leads nobody elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from patcher.bench import Candidate, Language
from patcher.bench.sandbox import plain_file, strangers_folder
from patcher.bench.toolchains import compilers
from patcher.bench.toolchains.compilers import LOG_LIMIT, CompileJob, compiled, run_compiler

SOURCE = "print('built')\n"


def built(tmp_path: Path, script: str, product: str = "made") -> tuple[Path | None, Path]:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    job = CompileJob(
        files={"build.py": script.replace("OUTSIDE", str(outside))},
        command=(sys.executable, "-P", "build.py"),
        product=product,
        binding="python",
        shown="build",
        version="1",
        built_for=(script,),
    )
    candidate = Candidate(op="norm", language=Language.CUTEDSL, source=SOURCE)
    cache = tmp_path / "cache"
    cache.mkdir()
    return compiled(candidate, job, cache).path, outside


@pytest.mark.parametrize("place", ["build.log", "norm.py"])
def test_nothing_is_written_or_read_through_a_link(place: str, tmp_path: Path) -> None:
    script = f"""
import os, pathlib
if os.path.lexists({place!r}):
    os.unlink({place!r})
os.symlink("OUTSIDE", {place!r})
pathlib.Path("made").write_text("made")
"""
    path, outside = built(tmp_path, script)
    assert outside.read_text() == "theirs"
    assert path is not None
    assert path.read_text() == "made"
    kept = {each.name: each.read_text() for each in path.parent.iterdir()}
    assert "theirs" not in kept.values()
    assert SOURCE in kept.values()


@pytest.mark.parametrize("make", ["os.symlink('OUTSIDE', 'made')", "os.mkfifo('made')"])
def test_a_product_that_is_no_file_is_no_build(make: str, tmp_path: Path) -> None:
    path, outside = built(tmp_path, f"import os\n{make}\n")
    assert path is None
    assert outside.read_text() == "theirs"


def test_a_source_that_its_build_rewrites_is_kept_as_it_was_judged(tmp_path: Path) -> None:
    candidate = Candidate(op="norm", language=Language.CUTEDSL, source=SOURCE)
    name = candidate.file_name
    path, _ = built(tmp_path, f"open({name!r}, 'w').write('other')\n", product=name)
    assert path is not None
    assert path.read_text() == SOURCE


def test_a_folder_goes_however_deep_it_is_nested(tmp_path: Path) -> None:
    with strangers_folder("deep-", tmp_path) as folder:
        place = folder
        for _ in range(300):
            place = place / "d"
            place.mkdir()
        (place / "locked").mkdir(mode=0)
        (folder / "link").symlink_to(tmp_path)
        assert plain_file(folder / "link") is None
        assert plain_file(folder / "none") is None
    assert not folder.exists()
    assert tmp_path.is_dir()


@pytest.mark.parametrize("code", [0, 1])
def test_of_a_flood_of_messages_head_and_tail_are_kept(code: int, tmp_path: Path) -> None:
    """As of `#pragma message` in a header that includes itself, or of templates' errors."""
    flood = f"""
print("the first error")
for _ in range(4000):
    print("note: " + "x" * 10_000)
print("the last error")
open("made", "w").write("made")
raise SystemExit({code})
"""
    command = [sys.executable, "-P", "-c", flood]
    ended, log = run_compiler(command, tmp_path)
    assert ended == code
    assert log.startswith("the first error\n")
    assert log.endswith("the last error\n")
    assert "bytes are left out" in log
    assert len(log) < 1.1 * 2**20
    cache = tmp_path / "cache"
    cache.mkdir()
    job = CompileJob(
        files={},
        command=tuple(command),
        product="made",
        binding="python",
        shown="build",
        version=str(code),
    )
    made = compiled(Candidate(op="norm", language=Language.CUTEDSL, source=SOURCE), job, cache)
    assert made.ok == (code == 0)
    assert len(made.log) < LOG_LIMIT + 100
    assert made.log.startswith("the first error\n")
    assert made.log.endswith("the last error\n")


def test_a_build_that_takes_too_much_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MEMORY_BYTES", 200 << 20)
    flood = """
import os, time
for name in range(60):
    os.posix_fallocate(os.open(str(name), os.O_CREAT | os.O_WRONLY), 0, 10 << 20)
time.sleep(60)
"""
    code, log = run_compiler([sys.executable, "-P", "-c", flood], tmp_path)
    assert code == 124
    assert log.startswith("the compiler was stopped: it took 0.6 GiB of memory")
