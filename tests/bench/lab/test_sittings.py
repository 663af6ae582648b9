"""Loops whose candidates are judged in sittings, with a worker on this machine as the host."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patcher.bench import UsageError, VerificationError
from patcher.bench.lab.sittings import keeping, sit, travel
from patcher.bench.lab.sittings.__main__ import app
from patcher.bench.lab.sittings.frozen import COMMITS
from patcher.bench.lab.sittings.loops import LoopFolder, read_problems, reply_to
from patcher.runs.run import Run

ROOT = Path(__file__).parents[3]
OP = "scaled_add"
BROKEN = f"void {OP}(Tensor x);"
"""Names a type that is not there: the compiler alone judges it."""

needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout"
)


def said(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def sat(loops: Path, host: Path) -> Path:
    """A sitting in another folder, by an environment of its own; returns its OUT."""
    shutil.copytree(loops / "travel", host / "kit")
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        ["bash", str(host / "kit/sitting.sh"), str(host / "out"), "--limit-s", "240"],
        env={**kept, "PYTHON": sys.executable, "WORK": str(host / "work")},
        cwd=host,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return host / "out"


@needs_git
def test_loops_go_on_over_a_sitting_and_in_another_folder(tmp_path: Path) -> None:
    loops, problems = tmp_path / "loops", tmp_path / "problems.txt"
    shutil.copytree(ROOT / "tests/data/ops" / OP, loops / "imported" / OP)
    problems.write_text(f"# one\nfirst {OP} --iterations 2\n")
    options: tuple[str, ...] = ("--", "--language", "cpp", "--iterations", "5", "--threads", "1")
    options += ("--diagnoser", "off")
    said("start", loops, problems, "--untold", *options)
    assert "0 of 1 loops ended" in said("start", loops, problems, *options)
    [prompt] = LoopFolder(loops).open_prompts()
    reply_to(prompt).write_text(f"```cpp\n{BROKEN}\n```\n")
    assert "0 replies to be written, 1 jobs" in said("step", loops)

    # what is kept goes on elsewhere
    file, elsewhere = tmp_path / "results/kept.tar.xz", tmp_path / "elsewhere"
    said("keep", loops, file)
    assert file.stat().st_size < 50_000
    assert "0 replies to be written, 1 jobs" in said("restore", elsewhere, file)
    assert {"code", "imported"} <= {path.name for path in elsewhere.iterdir()}
    shutil.rmtree(loops)

    said("pack", elsewhere)
    out = sat(elsewhere, tmp_path / "host")
    told = said("back", elsewhere, out)
    assert told.startswith(f"{OP}-")
    assert "compilation_failure" in told.splitlines()[0]
    assert "1 replies to be written, 0 jobs to be judged, 0 of 1" in told
    assert list((elsewhere / "exchange/machines").iterdir())
    [second] = LoopFolder(elsewhere).open_prompts()
    assert BROKEN in second.read_text(), "it is told of the candidate before"
    assert f"reply  {reply_to(second)}" in said("state", elsewhere)

    # a candidate that was there before is not judged again
    reply_to(second).write_text(f"```cpp\n{BROKEN}\n```\n")
    assert "ended  first: 2 candidates" in said("step", elsewhere)
    assert "1 of 1 loops ended" in said("step", elsewhere)


def folder_of_loops(root: Path, commit: str) -> LoopFolder:
    """One whose only loop has not asked yet, and whose code is not there."""
    Run.create(root / "runs/one", command="optimize").close()
    (root / COMMITS).write_text(f"{commit}\n")
    return LoopFolder(root)


@needs_git
def test_another_commit_is_told_and_a_known_one_can_be_gone_on_with(tmp_path: Path) -> None:
    words = ("git", "-c", f"safe.directory={ROOT}", "rev-list", "-2", "HEAD", "--", "patcher")
    known = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.split()
    if len(known) < 2:
        pytest.skip("a checkout without history")
    file = tmp_path / "kept.tar.xz"
    keeping.keep(folder_of_loops(tmp_path / "known", known[1]), file)
    told = keeping.restore(file, LoopFolder(tmp_path / "other"))
    assert told is not None
    assert f"kept with the code of commit {known[1]}, and go on with that of " in told
    assert known[1] in (tmp_path / "other" / COMMITS).read_text().split()[0]
    assert keeping.restore(file, LoopFolder(tmp_path / "same"), same_code=True) is None
    assert set((tmp_path / "same" / COMMITS).read_text().split()) == {known[1]}
    source = ("git", "-c", f"safe.directory={ROOT}", "show", f"{known[1]}:patcher/pipeline.py")
    before = subprocess.run(source, cwd=ROOT, capture_output=True).stdout
    assert (tmp_path / "same/code/patcher/pipeline.py").read_bytes() == before

    keeping.keep(folder_of_loops(tmp_path / "unknown", "0" * 40), file)
    with pytest.raises(UsageError, match="rev-parse"):
        keeping.restore(file, LoopFolder(tmp_path / "new"), same_code=True)
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))
    with pytest.raises(UsageError, match="is not empty"):
        keeping.restore(file, LoopFolder(tmp_path / "same"))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(VerificationError, match="cannot unpack"):
        keeping.restore(file, LoopFolder(tmp_path / "new"))


def test_loops_of_unknown_code_are_not_kept(tmp_path: Path) -> None:
    loops = folder_of_loops(tmp_path, "")
    with pytest.raises(UsageError, match="does not say of which commit"):
        keeping.keep(loops, tmp_path / "kept.tar.xz")
    with pytest.raises(UsageError, match="no loops"):
        keeping.keep(LoopFolder(tmp_path / "none"), tmp_path / "kept.tar.xz")


def test_a_packed_sitting_of_other_jobs_is_told(tmp_path: Path) -> None:
    loops = folder_of_loops(tmp_path, "0" * 40)
    (tmp_path / "code").mkdir()
    for name in ("a-1", "b-1"):
        job(loops.exchange, name)

    def told() -> bool:
        return any(line.startswith("pack ") for line in loops.state())

    assert told()  # nothing is packed yet
    travel.pack(loops)
    assert not told()
    verdict = loops.exchange / "results/a-1"
    verdict.mkdir(parents=True)
    (verdict / "manifest.json").write_text("{}")
    assert told()
    travel.pack(loops)
    assert loops.packed() == {"b-1"}
    assert not told()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("first\n", "line 1 does not begin with a name and an op"),
        ("\n../a rope\n", "line 2 does not begin"),
        ("a --sweep rope\n", "line 1 does not begin"),
        ("a rope\na rope # again\n", "line 2: a is there twice"),
        ('a rope "\n', "line 1: No closing quotation"),
        ("a.log rope\n", "line 1: a.log ends in .log"),
    ],
)
def test_a_list_of_problems_that_says_too_little_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "problems.txt").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_problems(tmp_path / "problems.txt")


def test_no_loop_starts_before_a_worker_has_told_of_its_machine(tmp_path: Path) -> None:
    (tmp_path / "problems.txt").write_text("a rope\n")
    with pytest.raises(UsageError, match="no worker has told"):
        LoopFolder(tmp_path).start(read_problems(tmp_path / "problems.txt"), ())
    assert not (tmp_path / "runs").exists()


def job(exchange: Path, name: str, settings: object = None) -> None:
    folder = exchange / "jobs" / name
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"settings": settings}))


def test_equal_settings_are_judged_side_by_side_and_late_jobs_last(tmp_path: Path) -> None:
    for name, pairs in (("a-1", 12), ("b-1", 3), ("c-1", 12), ("d-1", 3)):
        job(tmp_path, name, {"pairs": pairs})
    sit.arrange(tmp_path / "jobs", {"a-1"})
    oldest_first = sorted((tmp_path / "jobs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in oldest_first] == ["c-1", "b-1", "d-1", "a-1"]


WORKER = """
import fcntl, os, pathlib, sys, time
root = pathlib.Path(sys.argv[1])
(root / "claims").mkdir(exist_ok=True)
for job in sorted((root / "jobs").iterdir()):
    result = root / "results" / job.name
    if not result.is_dir():
        (root / "claims" / f"{job.name}.lock").write_text(f"{os.getpid()}\\n")
        if job.name.startswith("endless"):
            time.sleep(3600)
        result.mkdir(parents=True)
        (result / "result.json").write_text('{"refusal": {"message": "a double"}}')
        (result / "manifest.json").write_text("{}")
        (root / "claims" / f"{job.name}.lock").write_text("")
"""


class DoubleSitting(sit.Sitting):
    """Its workers claim jobs as real ones do, and judge nothing."""

    def command(self, gpu: str) -> Sequence[str]:
        return [sys.executable, "-c", WORKER, str(self.exchange)]


def test_a_job_that_takes_too_long_is_put_off_and_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sit, "POLL_S", 0.02)
    monkeypatch.setattr(sit, "Sitting", DoubleSitting)
    exchange, log = tmp_path / "exchange", tmp_path / "log"
    for name in ("endless-1", "short-1", "short-2"):
        job(exchange, name)
    assert sit.main([str(exchange), str(log), "--job-s", "1"]) == 1
    told = (log / "verdicts.txt").read_text()
    assert "short-1: refused: a double\nshort-2: refused: a double\nendless-1: put off\n" in told
    assert [path.name for path in (exchange / "put-off").iterdir()] == ["endless-1"]

    # what came back is taken in; verdicts that are there stay
    loops = LoopFolder(tmp_path / "loops")
    for name in ("endless-1", "short-1", "short-2"):
        job(loops.exchange, name)
    before = loops.exchange / "results/short-1/manifest.json"
    before.parent.mkdir(parents=True)
    before.write_text("{ }")
    (loops.exchange / "late.txt").write_text("endless-1\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/cache.tar.xz.aa").write_text("cache")
    travel.compress(tmp_path / "out/back.tar.xz", tmp_path, ["exchange", "log"])
    assert travel.back(loops, tmp_path / "out") == told
    assert [path.name for path in loops.open_jobs()] == ["endless-1"]
    assert before.read_text() == "{ }"
    assert (loops.exchange / "late.txt").read_text() == "endless-1\n"
    assert (loops.root / "cache/cache.tar.xz.aa").read_text() == "cache"
    assert (loops.exchange / "expected.txt").read_text() == (log / "machine.txt").read_text()


def test_another_machine_judges_only_if_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sit, "Sitting", DoubleSitting)
    job(tmp_path, "short-1")
    (tmp_path / "expected.txt").write_text("another card, another driver\n")
    words = [str(tmp_path), str(tmp_path / "log")]
    assert sit.main(words) == sit.ANOTHER_MACHINE
    assert "this is another machine" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    assert sit.main([*words, "--any-machine"]) == 0


def test_what_is_no_sitting_is_not_taken_in(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no back\.tar\.xz"):
        travel.back(LoopFolder(tmp_path), tmp_path)
    (tmp_path / "back.tar.xz").write_bytes(b"damaged")
    with pytest.raises(VerificationError, match="cannot unpack"):
        travel.back(LoopFolder(tmp_path), tmp_path)


LOG: dict[str, str | None] = {"log/verdicts.txt": "x\n", "log/machine.txt": "m\n"}
WHOLE = {"exchange/results/a-1/manifest.json": "{}\n"}


def archive(file: Path, entries: dict[str, str | None], links: dict[str, str]) -> Path:
    """One with files, folders (None) and links."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz") as opened:
        for name, text in entries.items():
            member, data = tarfile.TarInfo(name), (text or "").encode()
            member.size, member.mode = len(data), 0o755
            member.type = tarfile.DIRTYPE if text is None else tarfile.REGTYPE
            opened.addfile(member, io.BytesIO(data))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            hard = not target.startswith((".", "nothing"))
            member.type = tarfile.LNKTYPE if hard else tarfile.SYMTYPE
            member.linkname = target
            opened.addfile(member)
    return file


ODD = "exchange/results/a-1/odd"


@pytest.mark.parametrize(
    ("entries", "links", "words"),
    [
        (LOG | WHOLE, {ODD: "nothing"}, "is a special file"),
        # each of two doubles what the other leads to
        (LOG | WHOLE, {ODD: ".", f"{ODD}2": "."}, "is a special file"),
        (LOG | WHOLE, {ODD: "log/verdicts.txt"}, "is a special file"),
        (LOG, {"exchange/results/a-1": "../../log"}, "is a special file"),
        ({"../../out": "x"} | LOG, {}, "outside the destination"),
        (WHOLE, {}, r"holds no verdicts\.txt"),
        ({"log": "x"}, {}, r"holds no verdicts\.txt"),
        ({"log/verdicts.txt": "x"} | WHOLE, {}, r"holds no machine\.txt"),
        (LOG | {"exchange/machines/zeros": "\0" * 70_000}, {}, "holds more than 65,536 bytes"),
    ],
)
def test_an_archive_that_no_sitting_made_is_refused_and_leaves_nothing(
    entries: dict[str, str | None],
    links: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "65,536" in words:
        monkeypatch.setattr(travel, "MOST_BYTES", 1 << 16)
    loops = LoopFolder(tmp_path / "loops")
    loops.root.mkdir()
    archive(tmp_path / "out/back.tar.xz", entries, links)
    with pytest.raises(VerificationError, match=words):
        travel.back(loops, tmp_path / "out")
    assert not list(loops.root.iterdir())
    with pytest.raises(UsageError, match="no folder"):
        travel.back(LoopFolder(tmp_path / "none"), tmp_path / "out")


def test_what_is_no_whole_verdict_is_not_taken_in(tmp_path: Path) -> None:
    loops = LoopFolder(tmp_path / "loops")
    job(loops.exchange, "a-1")
    half = loops.exchange / "results/a-1/result.json"
    half.parent.mkdir(parents=True)
    half.write_text("of a command that was interrupted")
    odd: dict[str, str | None] = {
        "exchange/results/b-1/result.json": "half",
        "exchange/results/c-1": "a file",
        "exchange/machines/m.json/n": "in a folder",
        "exchange/put-off/a-1/job.json": "known",
        "exchange/put-off/b c/job.json": "not known",
    }
    given = LOG | WHOLE | {"exchange/results/a-1/result.json": "whole"} | odd
    archive(tmp_path / "out/back.tar.xz", given, {})
    for _ in range(2):
        travel.back(loops, tmp_path / "out")
        assert [path.name for path in (loops.exchange / "results").iterdir()] == ["a-1"]
        assert half.read_text() == "whole"
        assert not (loops.exchange / "machines").exists()
        assert (loops.exchange / "late.txt").read_text() == "a-1\n"


def test_why_no_worker_judges_is_said_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(DoubleSitting):
        def command(self, gpu: str) -> Sequence[str]:
            return [sys.executable, "-c", "raise SystemExit('no module \\x1b[31mtyper')"]

    monkeypatch.setattr(sit, "POLL_S", 0.02)
    monkeypatch.setattr(sit, "Sitting", Broken)
    job(tmp_path / "exchange", "a")
    assert sit.main([str(tmp_path / "exchange"), str(tmp_path / "log")]) == 1
    said = capsys.readouterr().out
    assert "2 workers ended without a verdict: ...no module <U+001B>[31mtyper" in said
    assert said.count("\x1b") == 0


def test_a_folder_without_loops_is_left_as_it_is(tmp_path: Path) -> None:
    other = LoopFolder(tmp_path / "other")
    for ask in (other.step, other.require):
        with pytest.raises(UsageError, match="is no folder of loops"):
            ask()
    assert not other.root.exists()


@needs_git
def test_a_file_in_place_of_the_loops_and_a_damaged_package_are_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a rope\n")
    with pytest.raises(UsageError, match="is a file"):
        LoopFolder(file)
    loops = LoopFolder(tmp_path / "loops")
    (loops.root / "wheels").mkdir(parents=True)
    (loops.root / "wheels/half.whl").write_text("half")
    with pytest.raises(VerificationError, match=r"half\.whl is damaged"):
        travel.pack(loops)
    assert not (loops.root / "travel/site.tar.xz").exists()


@needs_git
def test_kept_loops_bring_no_code_and_no_links(tmp_path: Path) -> None:
    kept: dict[str, str | None] = {COMMITS: "0" * 40 + "\n", "runs": None}
    file = archive(tmp_path / "kept.tar.xz", kept | {"code/patcher/__init__.py": "1 / 0"}, {})
    with pytest.raises(VerificationError, match="holds code, which are not kept"):
        keeping.restore(file, LoopFolder(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    # what was linked in the folder is kept as files
    loops, elsewhere = folder_of_loops(tmp_path / "loops", "0" * 40), tmp_path / "elsewhere"
    (elsewhere / "op").mkdir(parents=True)
    (elsewhere / "op/op.toml").write_text("x")
    (loops.root / "imported").symlink_to(elsewhere)
    os.link(elsewhere / "op/op.toml", elsewhere / "op/again.toml")
    keeping.keep(loops, file)
    keeping.restore(file, LoopFolder(tmp_path / "new"))
    assert (tmp_path / "new/imported/op/again.toml").read_text() == "x"
