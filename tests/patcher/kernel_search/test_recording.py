"""A finished loop as a folder that replays, and the ones that ship."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_sample import verdict
from command_line import ROOT, patcher

from patcher import pipeline
from patcher.bench import (
    Candidate,
    Evaluation,
    UsageError,
    VerificationError,
    content,
    load_ops,
)
from patcher.bench.lab.loop_runs import geomean_of
from patcher.bench.machine.environment import describe
from patcher.kernel_search import stage
from patcher.kernel_search.recording import (
    ABOUT,
    EVALUATIONS,
    FILES,
    REPLIES,
    TABLE,
    read,
    record,
    replay,
    table,
)
from patcher.kernel_search.recording_archive import recordings
from patcher.plan import RunPlan
from patcher.prompting.extract import WHOLE_FILES
from patcher.settings import resolve
from patcher.workloads import workload_for

ARCHIVE = ROOT / "bench" / "results" / "loop" / "recordings.tar.xz"
with tarfile.open(ARCHIVE) as archive:
    SHIPPED = sorted({name.partition("/")[0] for name in archive.getnames()})


@pytest.fixture(scope="module")
def shipped() -> Iterator[Path]:
    """A folder of all recordings that ship."""
    with recordings(ARCHIVE) as folders:
        yield folders[0].parent


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of the demo's conversation, judged here."""
    folder = tmp_path_factory.mktemp("loop")
    done = patcher(
        *("optimize", "fused_add_rms_norm", "--language", "cpp", "--model", "replay:demo"),
        *("--iterations", "2"),
        cwd=folder,
    )
    for _ in range(3):  # what other programs disturbed is judged again
        if "this machine is too busy" in done.stderr:
            done = patcher("resume", "latest", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert patcher("record", "latest", "rec", cwd=folder).returncode == 0
    return folder / "rec"


def test_a_kernel_that_a_loop_made_is_the_one_that_won_it(shipped: Path) -> None:
    made = [
        (candidate.digest, info.origin.removeprefix("loop "))
        for op in load_ops().values()
        for info, candidate in op.solutions()
        if info.origin != "hand"
    ]
    recorded = [(digest, name) for digest, name in made if (shipped / name).exists()]
    assert len(recorded) >= 2
    for digest, name in recorded:  # the headers of the others say that they are not
        assert read(shipped / name).optimisation.best_digest == digest


def test_it_replays_to_the_same_end(recorded: Path) -> None:
    assert replay(recorded) == []
    done = patcher("replay", "rec", "--json", cwd=recorded.parent)
    assert done.returncode == 0
    [one] = json.loads(done.stdout)["recordings"]
    assert one == {"folder": "rec", "differences": [], "op_changed": False}


@pytest.mark.parametrize("switched", [{}, {"analyst": "off", "diagnoser": "off"}])
def test_a_whole_run_is_recorded_too(
    switched: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its op and what that op can be worth come from its profile."""

    def no_patch(*_: object) -> None:
        raise UsageError("the loop is over", "stop here")

    def judged(candidates: list[Candidate]) -> list[Evaluation]:
        place = {"environment": describe("cpu")}
        return [verdict(one, 2.0).model_copy(update=place) for one in candidates]

    judges = SimpleNamespace(evaluate=judged, prepare=None)
    monkeypatch.setattr(stage, "open_judges", lambda *_, **__: nullcontext(judges))
    monkeypatch.setattr(pipeline, "make_patch", no_patch)
    monkeypatch.setattr(pipeline, "_first_covered", lambda *_: "fused_add_rms_norm")
    monkeypatch.chdir(tmp_path)
    settings = resolve({"model": "replay:demo", "iterations": 2, "memory": "off", **switched})
    workload, plan = workload_for("gpt-oss-tiny", "cpu"), RunPlan(threads=1)
    trace = ROOT / "tests/data/nsys/decode.sqlite"
    with pipeline.start(settings, "run", "gpt-oss-tiny", workload, plan, trace) as run:
        with pytest.raises(UsageError, match="is not finished"):
            record(run.path, tmp_path / "early")
        with pytest.raises(UsageError, match="the loop is over"):
            pipeline.execute(run, lambda *_: None, lambda _: None)
    made = record(run.path, tmp_path / "rec")
    assert made.op == "fused_add_rms_norm"
    assert made.rules.share_pct is not None
    assert replay(tmp_path / "rec") == []


def test_a_person_can_read_it(recorded: Path) -> None:
    text = (recorded / TABLE).read_text()
    assert text.startswith("# `fused_add_rms_norm` in cpp, strategy `refine`")
    assert "| 0 | functional | correct | " in text
    assert "| 1 | optimisation | " in text
    made = read(recorded)
    assert len(made.tokens) == 2
    assert made.reading == WHOLE_FILES
    assert min(made.tokens[1]) > 100
    asked = (recorded / REPLIES).read_text().splitlines()
    assert [json.loads(line)["role"] for line in asked] == ["generate", "analyse", "generate"]


def test_what_was_changed_shows(recorded: Path, tmp_path: Path) -> None:
    changed = tmp_path / "rec"
    shutil.copytree(recorded, changed)
    about = json.loads((changed / ABOUT).read_text())
    about["optimisation"]["iterations"][1]["geomean_speedup"] = 99.0
    about["optimisation"]["best_speedup"] = 99.0
    (changed / ABOUT).write_text(json.dumps(about))
    said = replay(changed)
    assert any("best_speedup: 99.0 then" in each for each in said)
    assert "iteration 1: another geomean_speedup" in said
    assert patcher("replay", str(changed), cwd=tmp_path).returncode == 5


def test_a_missing_verdict_and_no_recording_are_said(recorded: Path, tmp_path: Path) -> None:
    changed = tmp_path / "rec"
    shutil.copytree(recorded, changed)
    lines = (changed / EVALUATIONS).read_text().splitlines(keepends=True)
    (changed / EVALUATIONS).write_text("".join(lines[1:]))
    with pytest.raises(VerificationError, match="no verdict"):
        replay(changed)
    with pytest.raises(UsageError, match="holds no recording"):
        replay(tmp_path)
    with pytest.raises(UsageError, match="is there"):
        record(next((recorded.parent / "patcher-runs").iterdir()), recorded)


def told_of(recorded: Path, folder: Path, **values: object) -> str:
    """What the command says of a recording whose fields were changed."""
    shutil.copytree(recorded, folder)
    about = json.loads((folder / ABOUT).read_text())
    best = about["optimisation"] | {"best_digest": values.pop("best", about["contract"])}
    (folder / ABOUT).write_text(json.dumps(about | {"optimisation": best} | values))
    done = patcher("replay", str(folder), cwd=folder.parent)
    return done.stdout + done.stderr


def test_a_strangers_recording_is_read_with_care(recorded: Path, tmp_path: Path) -> None:
    said = told_of(recorded, tmp_path / "esc", best="\x1b[31mred")
    assert "<U+001B>[31mred then" in said
    assert "\x1b" not in said
    search = {"strategy": "evolve", "islands": 10**9}
    assert "holds no recording" in told_of(recorded, tmp_path / "islands", search=search)
    for name in (ABOUT, EVALUATIONS):
        folder = tmp_path / f"pipe-{name}"
        shutil.copytree(recorded, folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UsageError, match="is a pipe"):
            replay(folder)


def test_an_op_that_is_another_or_not_here_is_said(recorded: Path, tmp_path: Path) -> None:
    said = told_of(recorded, tmp_path / "changed", contract="0" * 64)
    assert "the op is another than was judged then" in said
    said = told_of(recorded, tmp_path / "own", op="my_op")
    assert "own needs its op: unknown op 'my_op'" in said
    assert "PATCHER_OPS" in said


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:xz") as made:
        for member, content in entries:
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_of_recordings_replays(recorded: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "two.tar.xz", "w:xz") as made:
        made.add(recorded, "a")
        made.add(recorded, "b")
    done = patcher("replay", "two.tar.xz", str(recorded), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["recordings"]
    assert [one["folder"] for one in told] == ["a", "b", "rec"]
    assert not any(one["differences"] for one in told)


def test_an_archive_that_is_none_is_said(tmp_path: Path) -> None:
    whole = pack(tmp_path / "whole.tar.xz", (tarfile.TarInfo(f"a/{ABOUT}"), b"x" * 100_000))
    cut, flipped, text = (tmp_path / f"{name}.tar.xz" for name in ("cut", "flipped", "text"))
    content = whole.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    flipped.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    text.write_text("no archive")
    for path in (cut, flipped, text):
        with pytest.raises(UsageError, match="damaged archive"), recordings(path):
            pass
    with pytest.raises(UsageError, match="cannot unpack"), recordings(tmp_path / "none.tar.xz"):
        pass
    with (
        pytest.raises(UsageError, match="holds no recording"),
        recordings(pack(tmp_path / "empty.tar.xz")),
    ):
        pass
    link = tarfile.TarInfo(f"a/{ABOUT}")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    device = tarfile.TarInfo(f"a/{ABOUT}")
    device.type = tarfile.FIFOTYPE
    names = ("../outside/README.md", "/tmp/README.md", "../README.md", "a/b/README.md", "a/other")
    for member in (link, device, *map(tarfile.TarInfo, names)):
        wrong = pack(tmp_path / "wrong.tar.xz", (member, b""))
        with pytest.raises(UsageError, match="no file of a recording"), recordings(wrong):
            pass


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patcher.kernel_search.recording_archive.MOST_BYTES", 100)
    large = pack(tmp_path / "large.tar.xz", (tarfile.TarInfo(f"a/{ABOUT}"), b"x" * 101))
    with pytest.raises(UsageError, match="unpacks to more than"), recordings(large):
        pass


@pytest.mark.parametrize("name", SHIPPED)
def test_recordings_that_ship_replay(name: str, shipped: Path) -> None:
    assert replay(shipped / name) == []
    assert sorted(path.name for path in (shipped / name).iterdir()) == sorted(FILES)
    assert (shipped / name / TABLE).read_text(encoding="utf-8") == table(read(shipped / name))


def speedup_of(verdict: dict[str, float]) -> float:
    return verdict["geomean_speedup"]


def test_speedups_of_loops_that_go_on_are_those_of_their_verdicts() -> None:
    """Each that the page says of `linear_fp8` and `decode_attention`, and no other."""
    kept = json.loads(content(ARCHIVE.parent / "h200-rounds.json.xz"))["verdicts"]
    page = (ARCHIVE.parent / "README.md").read_text(encoding="utf-8")
    _, rest = page.split("## Loops that go on")
    rows = [line.split("|")[3] for line in rest.splitlines() if line.count("|") == 5]
    told = [float(found) for row in rows[2:6] for found in re.findall(r"\d\.\d\d", row)]
    ops = ("linear_fp8", "decode_attention")
    right = [round(speedup_of(each), 2) for each in kept if each["op"] in ops]
    assert len(told) == len(right) == 18
    assert sorted(told) == sorted(right)
    [fastest] = [
        each for each in kept if each["geomean_speedup"] == pytest.approx(1.5336, abs=1e-4)
    ]
    points = [round(point["speedup"], 2) for point in fastest["timings"]]
    assert (min(points), max(points)) == (1.21, 1.68)


def test_what_each_part_brings_is_what_the_ablations_came_to() -> None:
    kept = json.loads(content(ARCHIVE.parent / "ablations.json.xz"))
    page = (ARCHIVE.parent / "README.md").read_text(encoding="utf-8")
    page, _, _ = page.partition("## What each part brings, on a GPU")
    found = {row["variant"]: row for row in kept["table"]}
    again: dict[str, dict[str, list[float]]] = {}
    for each in kept["best_judged_again"]:
        logs = again.setdefault(each["variant"], {}).setdefault(each["op"], [])
        logs.append(math.log(each["speedup"]))
    base = {op: sum(logs) / len(logs) for op, logs in again["all parts"].items()}
    for name, told in (
        ("no analyst", "no analyst"),
        ("no memory", "no memory"),
        ("beam", "`beam`"),
    ):
        against = found[name]["against"]
        ratios = [math.exp(sum(x) / len(x) - base[op]) for op, x in again[name].items()]
        judged = geomean_of(ratios, list(again[name]))
        assert judged.low is not None
        assert judged.high is not None
        words = (
            f"{against['value']:.2f} ({against['low']:.2f} to {against['high']:.2f})",
            f"{judged.value:.2f} ({judged.low:.2f} to {judged.high:.2f})",
        )
        [line] = [line for line in page.splitlines() if line.startswith(f"| {told}")]
        assert all(word in line for word in words), words
    for name, asked in kept["asked"].items():
        thousands = (asked["prompt_bytes"] + asked["reply_bytes"]) / 3500 / 5
        [line] = [
            line
            for line in page.splitlines()
            if line.startswith(f"| {name}".replace("beam", "`beam`"))
        ]
        assert f"| {asked['prompts'] // 5}, {thousands:.0f} |" in line
    assert sum(asked["prompts"] for asked in kept["asked"].values()) == 121
    tried = [one for each in kept["candidates"] for one in each["speedups"]]
    assert (len(tried), tried.count("mismatch")) == (80, 6)
