"""A finished loop as a folder that replays, and the ones that ship."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_cli import ROOT, patcher

from patcher.bench import UsageError, VerificationError, load_ops
from patcher.kernel_search.recording import ABOUT, EVALUATIONS, REPLIES, TABLE, read, record, replay

SHIPPED = sorted(path.parent for path in (ROOT / "bench" / "results" / "loop").rglob(ABOUT))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of the demo's conversation, judged here."""
    folder = tmp_path_factory.mktemp("loop")
    done = patcher(
        *("optimize", "fused_add_rms_norm", "--language", "cpp", "--model", "replay:demo"),
        *("--iterations", "2"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert patcher("record", "latest", "rec", cwd=folder).returncode == 0
    return folder / "rec"


def test_a_kernel_that_a_loop_made_is_the_one_that_won_it() -> None:
    made = [
        (candidate.digest, info.origin.removeprefix("loop "))
        for op in load_ops().values()
        for info, candidate in op.solutions()
        if info.origin != "hand"
    ]
    assert len(made) >= 2
    for digest, recording in made:
        folder = ROOT / "bench" / "results" / "loop" / recording
        assert read(folder).optimisation.best_digest == digest


def test_it_replays_to_the_same_end(recorded: Path) -> None:
    assert replay(recorded) == []
    done = patcher("replay", "rec", "--json", cwd=recorded.parent)
    assert done.returncode == 0
    [one] = json.loads(done.stdout)["recordings"]
    assert one == {"folder": "rec", "differences": []}


def test_a_person_can_read_it(recorded: Path) -> None:
    text = (recorded / TABLE).read_text()
    assert text.startswith("# `fused_add_rms_norm` in cpp, strategy `refine`")
    assert "| 0 | functional | correct | " in text
    assert "| 1 | optimisation | " in text
    made = read(recorded)
    assert len(made.tokens) == 2
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


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_recordings_that_ship_replay(folder: Path) -> None:
    assert replay(folder) == []
