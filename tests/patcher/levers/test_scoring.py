"""A user's own measure: asked once, kept with the run, and its failures are its user's."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from patcher.bench import Evaluation, Outcome, UsageError, VerificationError
from patcher.levers.record import ScoreLever
from patcher.levers.scoring import Scorer
from patcher.runs.run import Run

OP = "fused_add_rms_norm"
ECHO = """\
import json, os, sys
told = json.load(sys.stdin)
source = open(told["artefacts"]["candidate"]).read()
secrets = [name for name in os.environ if "KEY" in name]
print(json.dumps({"score": len(source) + told["iteration"], "note": repr(secrets)}))
"""


def evaluation() -> Evaluation:
    return Evaluation(op=OP, language="cpp", digest="0" * 64, outcome=Outcome.MISMATCH)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path / "runs", command="optimize")
    made.write("ops/candidate.cpp", "void f();\n")
    return made


def scorer(run: Run, script: str, tmp_path: Path, name: str = "score.py", **more: float) -> Scorer:
    (tmp_path / name).write_text(script)
    return Scorer(run, ScoreLever(script=tmp_path / name, **more))


FILES = {"candidate": "ops/candidate.cpp"}


def test_a_script_reads_files_and_says_a_score(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish")
    assert scorer(run, ECHO, tmp_path)(3, evaluation(), FILES) == 13
    stored = json.loads((run.path / f"steps/{OP}/3/score.json").read_text())
    assert stored["note"] == "[]", "no key reaches it"


def test_it_is_asked_once(run: Run, tmp_path: Path) -> None:
    counting = f"""
import pathlib
log = pathlib.Path({str(tmp_path / "log")!r})
log.write_text((log.read_text() if log.exists() else "") + "x")
print('{{"score": 1.5}}')
"""
    for _ in range(3):
        assert scorer(run, counting, tmp_path)(0, evaluation(), FILES) == 1.5
    assert (tmp_path / "log").read_text() == "x"


def test_a_resumed_run_goes_on_with_the_script_of_its_first_score(run: Run, tmp_path: Path) -> None:
    first = scorer(run, "print('{\"score\": 1}')", tmp_path)
    assert first(0, evaluation(), FILES) == 1
    run.close()
    again = Run.open(run.path)
    changed = scorer(again, "print('{\"score\": 2}')", tmp_path)
    assert changed(1, evaluation(), FILES) == 1
    (tmp_path / "score.py").unlink()
    assert changed(2, evaluation(), FILES) == 1
    [kept] = (again.path / "levers").iterdir()
    kept.write_text("print(9)")
    with pytest.raises(VerificationError, match="score script of run"):
        changed(3, evaluation(), FILES)


def test_a_script_that_failed_may_be_corrected(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exit code 1: ZeroDivisionError: division by zero"):
        scorer(run, "1 / 0", tmp_path)(0, evaluation(), FILES)
    assert scorer(run, "print('{\"score\": 2}')", tmp_path)(0, evaluation(), FILES) == 2


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("", "printed no score"),
        ("echo fast", "printed no score"),
        ('echo \'{"score": "1"}\'', "score: Input should be a valid number"),
        ("echo '{\"score\": true}'", "score"),
        ("echo '{\"score\": NaN}'", "score"),
        ("echo '{\"score\": 1e999}'", "score: Input should be a finite number"),
        ('echo \'{"score": 1, "speedup": 2}\'', "speedup: Extra inputs"),
        ("echo '[1]'", "printed no score"),
        ("sleep 60", "did not answer in 1 s"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_what_is_no_score_is_one_clear_error(
    run: Run, tmp_path: Path, script: str, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        scorer(run, script, tmp_path, "score.sh", timeout_s=1)(0, evaluation(), FILES)
    assert "score.sh" in caught.value.message
    assert caught.value.hint
    assert not run.done(f"{OP}/0/score"), "the step stays open"


def test_nothing_that_it_started_outlives_it(run: Run, tmp_path: Path) -> None:
    script = f"""\
sleep 300 &
echo $! > {tmp_path}/pid
echo '{{"score": 7}}'
"""
    assert scorer(run, script, tmp_path, "score.sh")(0, evaluation(), FILES) == 7
    pid = int((tmp_path / "pid").read_text())
    for _ in range(600):  # it is killed, and gone as soon as the kernel has come to it
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.05)
    pytest.fail("what the script started still runs")


def test_a_script_says_how_it_is_run(run: Run, tmp_path: Path) -> None:
    line = "#!/bin/sh\necho '{\"score\": 4}'\n"
    assert scorer(run, line, tmp_path, "rank")(0, evaluation(), FILES) == 4
    other = Run.create(tmp_path / "runs", command="optimize")
    with pytest.raises(UsageError, match="how to run"):
        scorer(other, "echo 1", tmp_path, "rank")(0, evaluation(), FILES)
    with pytest.raises(UsageError, match="cannot be started"):
        scorer(other, "#!/no/such/thing\n", tmp_path, "rank")(0, evaluation(), FILES)


def test_only_paths_of_the_run_are_told(run: Run, tmp_path: Path) -> None:
    script = "import sys; open('/dev/stderr', 'w').write(sys.stdin.read()); sys.exit(3)"
    keep = f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(sys.stdin.read()); sys.exit(3)"
    for each in (script, keep):
        with pytest.raises(UsageError, match="exit code 3"):
            scorer(run, each, tmp_path)(0, evaluation(), FILES)
    told = json.loads((tmp_path / "told").read_text())
    assert set(told) == {"schema_version", "op", "iteration", "evaluation", "artefacts"}
    assert Path(told["artefacts"]["candidate"]).read_text() == "void f();\n"
    assert os.path.isabs(told["artefacts"]["candidate"])
