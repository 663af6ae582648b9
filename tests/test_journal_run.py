"""Runs: steps are done once, whatever kills the process in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import Record, UsageError, VerificationError, WaitingError
from patcher.journal import read_events
from patcher.run import Run


class Value(Record):
    number: int
    text: str = ""


def test_create_find_and_reopen(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="demo", model="org/gpt-oss-tiny", settings={"n": 1}) as run:
        assert "gpt-oss-tiny" in run.id
    with Run.create(tmp_path, command="optimize") as other:
        pass
    assert Run.list(tmp_path) == [run.path, other.path]
    assert Run.latest(tmp_path) == Run.find(tmp_path, "latest") == other.path
    assert Run.find(tmp_path, run.id) == Run.find(tmp_path, str(run.path)) == run.path
    with Run.open(run.path) as again:
        assert again.config == run.config
    for text in ("20", "nonsense"):
        with pytest.raises(UsageError):
            Run.find(tmp_path, text)
    with pytest.raises(UsageError):
        Run.latest(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a run"):
        Run.open(tmp_path)


def test_a_step_is_done_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> Value:
        calls.append(1)
        return Value(number=7, text="é ```\r\n")

    with Run.create(tmp_path, command="demo") as run:
        first = run.step("op/0/ask", make, Value)
        assert run.step("op/0/ask", make, Value) == first
    with Run.open(run.path) as again:
        assert again.step("op/0/ask", make, Value) == first
        assert again.done("op/0/ask")
    assert len(calls) == 1
    assert json.loads((run.path / "steps/op/0/ask.json").read_text())["number"] == 7


def test_a_record_that_json_cannot_hold_is_found_at_once(tmp_path: Path) -> None:
    class Measured(Record):
        speedup: float

    with Run.create(tmp_path, command="demo") as run:
        with pytest.raises(ValueError, match="JSON"):
            run.step("ask", lambda: Measured(speedup=float("inf")), Measured)
        assert not run.done("ask")
        assert not (run.path / "steps/ask.json").exists()


def test_an_expected_error_leaves_the_step_open(tmp_path: Path) -> None:
    def wait() -> Value:
        raise WaitingError("waiting for /a/path", "write it")

    with Run.create(tmp_path, command="demo") as run:
        with pytest.raises(WaitingError):
            run.step("ask", wait, Value)
        assert list(run.state.pending) == ["ask"]
        assert run.step("ask", lambda: Value(number=1), Value).number == 1
        assert not run.state.pending
    text = (run.path / "journal.jsonl").read_text()
    assert '"error": "waiting"' in text
    assert "/a/path" not in text


def test_a_changed_artefact_is_found(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="demo") as run:
        run.step("one", lambda: Value(number=1), Value)
        run.step("two", lambda: Value(number=2), Value)
    artefact = run.path / "steps/one.json"
    artefact.write_text(artefact.read_text().replace("1", "9", 1))
    (run.path / "steps/two.json").unlink()
    with Run.open(run.path) as again:
        with pytest.raises(VerificationError, match="one was changed"):
            again.step("one", lambda: Value(number=1), Value)
        with pytest.raises(VerificationError, match="two cannot be read"):
            again.load("two", Value)
        with pytest.raises(UsageError, match="not done"):
            again.load("three", Value)


def test_a_changed_configuration_is_found(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="demo", settings={"margin_pct": 0.5}) as run:
        pass
    config = run.path / "run.json"
    config.write_text(config.read_text().replace("0.5", "0.1"))
    for read_only in (True, False, False):  # twice: a refused opening leaves no lock
        with pytest.raises(VerificationError, match=r"run\.json"):
            Run.open(run.path, read_only=read_only)


def test_files_stay_inside_and_unchanged_ones_are_left_alone(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="demo") as run:
        run.write("ops/x/0/reply.md", "one\r\n")
        before = (run.path / "ops/x/0/reply.md").stat().st_mtime_ns
        run.write("ops/x/0/reply.md", "one\r\n")
        assert (run.path / "ops/x/0/reply.md").stat().st_mtime_ns == before
        assert (run.path / "ops/x/0/reply.md").read_bytes() == b"one\r\n"
        for outside in ("../x", "/tmp/x", "a/../../x"):
            with pytest.raises(ValueError, match="outside"):
                run.write(outside, "x")
            with pytest.raises(ValueError, match="step name"):
                run.step(outside, lambda: Value(number=1), Value)
        with Run.open(run.path, read_only=True) as watched:
            assert len(watched.events) == 1
            with pytest.raises(ValueError, match="read-only"):
                watched.step("x", lambda: Value(number=1), Value)


WORKER = """
import os, signal, sys
from pathlib import Path
from bench import Record
import patcher.journal, patcher.run
from patcher.run import Run

class Value(Record):
    number: int
    text: str = ""

folder, effects, boundary = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

# Die before or after the boundary-th durable act: a journal line (whole or torn) or an artefact.
acts = 0
def act(do, torn=None):
    global acts
    acts += 1
    if acts == boundary:
        if torn:
            torn()
        os.kill(os.getpid(), signal.SIGKILL)
    do()

write_all, atomically = patcher.journal._write_all, patcher.run._write_atomically
patcher.journal._write_all = lambda handle, content: act(
    lambda: write_all(handle, content), lambda: os.write(handle, content[: len(content) // 2])
)
patcher.run._write_atomically = lambda path, text: act(lambda: atomically(path, text))

def effect(number):
    with effects.open("a") as file:
        file.write(f"{number}\\n")
    return Value(number=number)

with Run.open(folder) as run:
    total = sum(run.step(f"op/{n}/ask", lambda n=n: effect(n), Value).number for n in range(3))
    run.write("total.txt", str(total))
print(total)
"""


def work(folder: Path, effects: Path, boundary: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WORKER, str(folder), str(effects), str(boundary)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


# Each step is three durable acts: the intent, the artefact, the result; then comes total.txt.
@pytest.mark.parametrize("boundary", range(1, 11))
def test_killed_at_any_boundary_the_run_goes_on(tmp_path: Path, boundary: int) -> None:
    effects = tmp_path / "effects"
    with Run.create(tmp_path / "runs", command="demo") as run:
        pass
    killed = work(run.path, effects, boundary)
    assert killed.returncode == -signal.SIGKILL
    events = read_events(run.path / "journal.jsonl")
    finished = [event.step for event in events if event.kind == "result"]
    resumed = work(run.path, effects, 0)
    assert resumed.stdout == "3\n", resumed.stderr
    assert (run.path / "total.txt").read_text() == "3"
    counts = [effects.read_text().split().count(str(n)) for n in range(3)]
    # Only the step whose artefact was being written is done again; one killed later is not.
    in_artefact = boundary % 3 == 2
    assert counts == [2 if in_artefact and n == boundary // 3 else 1 for n in range(3)]
    assert len(finished) == (boundary - 1) // 3
    with Run.open(run.path, read_only=True) as done:
        assert list(done.state.results) == [f"op/{n}/ask" for n in range(3)]
        assert done.state.pending == ()
