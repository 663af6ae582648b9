"""Runs: steps are done once, whatever kills the process in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from patcher.bench import Record, UsageError, VerificationError, WaitingError
from patcher.runs.run import Run


class Value(Record):
    number: int = 0
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


def test_a_kind_of_record_keeps_its_name_in_the_journal_when_its_class_is_renamed(
    tmp_path: Path,
) -> None:
    class NewName(Value):
        recorded_as: ClassVar[str] = "OldName"

    with Run.create(tmp_path, command="demo") as run:
        run.step("kept", lambda: NewName(number=1), NewName)
        run.step("other", lambda: Value(number=2), Value)
        assert {data["record"] for data in run.state.results.values()} == {"OldName", "Value"}
        run.start_over({"processor": "another"}, [NewName])
        assert set(run.state.results) == {"kept"}
        assert run.load("kept", NewName).number == 1


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


def test_a_whole_artefact_that_was_not_renamed_yet_is_taken_over(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="demo") as run:
        with pytest.raises(KeyboardInterrupt):
            run.step("ask", interrupted, Value)
        temporary = run.path / "steps/.ask.json.tmp"
        text = Value(number=7).model_dump_json(indent=1) + "\n"
        for torn in ("", text[: len(text) // 2], text.rstrip("\n")):
            temporary.write_text(torn)
            with pytest.raises(KeyboardInterrupt):
                run.step("ask", interrupted, Value)
            assert not temporary.exists()
        temporary.write_text(text)
        assert run.step("ask", interrupted, Value).number == 7
        assert run.step("ask", interrupted, Value).number == 7


def interrupted() -> Value:
    raise KeyboardInterrupt


def test_a_run_killed_before_its_first_line_can_be_looked_at_and_resumed(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="demo") as run:
        pass
    (run.path / "journal.jsonl").unlink()
    watched = Run.open(run.path, read_only=True)
    assert (watched.state.results, watched.written) == ({}, False)
    with Run.open(run.path) as again:
        assert again.step("one", lambda: Value(number=1), Value).number == 1
        assert watched.written


FULL_DISK = """
import json, resource, sys
from pathlib import Path
from patcher.bench import MissingError, Record
from patcher.runs.run import Run

class Value(Record):
    text: str

with Run.open(Path(sys.argv[1])) as run:
    run.step("small", lambda: Value(text="x"), Value)
    size = (run.path / "journal.jsonl").stat().st_size + int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    said = []
    for attempt in range(2):
        try:
            run.step("large", lambda: Value(text="x" * int(sys.argv[3])), Value)
        except MissingError as error:
            said.append(error.message)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.note("after", said=said)
"""


@pytest.mark.parametrize(
    ("room", "size", "kept"), [(20, 10, False), (4000, 20_000, False), (250, 10, True)]
)
def test_a_full_disk_damages_nothing(tmp_path: Path, room: int, size: int, kept: bool) -> None:
    """The limit on a file's size is met by the intent, by the artefact, or by the result: then
    the artefact is there and is not made again."""
    with Run.create(tmp_path, command="demo") as run:
        pass
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(run.path), str(room), str(size)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    with Run.open(run.path) as again:
        [said] = [note.data["said"] for note in again.state.notes if note.step == "after"]
        assert len(said) == 2
        assert "cannot write" in said[0]
        assert again.load("small", Value).text == "x"
        assert again.step("large", lambda: Value(text="y"), Value).text[0] == "yx"[kept]
