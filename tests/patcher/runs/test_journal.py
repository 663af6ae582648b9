"""The journal: chain, torn lines, damage, the lock."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import patcher.runs.durable
import patcher.runs.journal
from patcher.bench import UsageError, VerificationError
from patcher.runs.journal import GENESIS, Journal, fold, is_written, read_events


def write_some(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("note", "run", {"text": "first"})
        journal.append("intent", "a/0/ask")
        journal.append("result", "a/0/ask", {"digest": "d"})
        journal.append("intent", "a/0/evaluate")


def test_appends_and_folds(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_some(path)
    events = read_events(path)
    assert [event.seq for event in events] == [0, 1, 2, 3]
    assert events[0].prev == GENESIS
    assert all(event.time.endswith("+00:00") for event in events)
    state = fold(events)
    assert state.results == {"a/0/ask": {"digest": "d"}}
    assert state.pending == ("a/0/evaluate",)
    assert [note.data for note in state.notes] == [{"text": "first"}]


def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_some(path)
    before = path.read_bytes()
    with Journal(path) as journal:
        journal.append("result", "a/0/evaluate", {})
    assert path.read_bytes().startswith(before)
    assert fold(read_events(path)).pending == ()


def test_torn_last_line_is_dropped_at_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_some(path)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_events(path)) == 3
        with Journal(path) as journal:
            assert len(journal.events) == 3
            assert path.read_bytes() == whole[:start]
            journal.append("intent", "a/0/evaluate")
        assert len(read_events(path)) == 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_byte_before_the_last_line_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write_some(path)
    content = bytearray(path.read_bytes())
    last = bytes(content).rstrip(b"\n").rfind(b"\n")
    at = data.draw(st.integers(0, last))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(VerificationError, match="damaged"):
        Journal(path)
    with Journal(path.with_name("other.jsonl")):
        pass  # a failed opening leaves no lock behind for other journals
    with pytest.raises(VerificationError, match="damaged"):  # and none on this one
        Journal(path)


def test_removed_and_swapped_lines_are_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_some(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (lines[1:], [lines[0], *lines[2:]], [lines[0], lines[2], lines[1], lines[3]]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(VerificationError, match="line"):
            Journal(path)


def test_lines_are_json_for_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append("note", "run", {"text": "é\u2028\n"})
    line = json.loads(path.read_text(encoding="utf-8"))
    assert set(line) == {"schema_version", "seq", "time", "kind", "step", "data", "prev"}
    assert line["data"]["text"] == "é\u2028\n"


def other_writer(path: Path, code: str = "sys.stdin.read()") -> subprocess.Popen[bytes]:
    """Another process that holds the journal open for writing."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, pathlib; from patcher.runs.journal import Journal\n"
            f"j = Journal(pathlib.Path(sys.argv[1])); print('held', flush=True); {code}",
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


def test_second_writer_is_refused_and_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    child = other_writer(path)
    try:
        with pytest.raises(UsageError, match=f"process {child.pid}") as caught:
            Journal(path)
        assert str(child.pid) in caught.value.hint
        assert read_events(path) == []  # looking takes no lock
        assert is_written(path)
        child.send_signal(signal.SIGSTOP)  # a process that hangs is a writer still
        with pytest.raises(UsageError, match=f"process {child.pid}"):
            Journal(path)
    finally:
        child.kill()
        child.communicate()
    assert not is_written(path)
    with Journal(path) as journal:  # the kernel freed the dead writer's lock
        journal.append("note", "run")


def test_a_process_that_only_has_the_writers_number_is_not_named(tmp_path: Path) -> None:
    """The dead writer's number is another's by now: nobody is told to stop that one."""
    path = tmp_path / "journal.jsonl"
    innocent = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    child = other_writer(path)
    try:
        owner = path.with_suffix(".owner")
        owner.write_text(f"{innocent.pid} 12345\n")
        for said in (owner.read_text(), f"{innocent.pid}\n", "", "nonsense"):
            owner.write_text(said)
            with pytest.raises(UsageError, match="by another process") as caught:
                Journal(path)
            assert str(innocent.pid) not in f"{caught.value.message} {caught.value.hint}"
        child.kill()
        child.communicate()
        owner.write_text(f"{innocent.pid} 12345\n")
        Journal(path).close()  # alive or not, it holds no lock
    finally:
        for process in (innocent, child):
            process.kill()
            process.communicate()


def test_what_the_writer_started_does_not_hold_the_lock_after_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    begin = "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    child = other_writer(path, begin + "print(p.pid, flush=True); sys.stdin.read()")
    assert child.stdout is not None
    left = int(child.stdout.readline())
    try:
        child.kill()
        child.wait()
        os.kill(left, 0)
        Journal(path).close()
    finally:
        os.kill(left, signal.SIGKILL)
        child.communicate()


def test_the_lock_cannot_be_got_around_by_deleting_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path):
        for file in tmp_path.iterdir():
            if file != path:
                file.unlink()
        with pytest.raises(UsageError, match="is being written"):
            Journal(path)


def test_many_at_once_make_one_chain(tmp_path: Path) -> None:
    """Four processes want the same journal over and over: one has it at a time."""
    path = tmp_path / "journal.jsonl"
    code = (
        "import sys, pathlib; from patcher.bench import UsageError\n"
        "from patcher.runs.journal import Journal\n"
        "done = 0\n"
        "while done < 5:\n"
        "    try:\n"
        "        with Journal(pathlib.Path(sys.argv[1])) as journal:\n"
        "            journal.append('intent', 'x'); journal.append('result', 'x'); done += 1\n"
        "    except UsageError: pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(path)]
    children = [subprocess.Popen(command, env=environment) for _ in range(4)]
    assert [child.wait(120) for child in children] == [0] * 4
    kinds = [event.kind for event in read_events(path)]
    assert kinds == ["intent", "result"] * 20


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match="No locks available") as caught:
        Journal(tmp_path / "journal.jsonl")
    assert "PATCHER_RUNS_DIR" in caught.value.hint


def test_same_process_cannot_write_twice_either(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path), pytest.raises(UsageError, match=str(os.getpid())):
        Journal(path)
    Journal(path).close()


def test_interrupted_while_appending_the_next_line_still_follows(tmp_path: Path) -> None:
    """Ctrl-C after each line of code of an append: what is appended then, while the command
    unwinds, belongs to the chain."""
    for lines in itertools.count(1):
        path = tmp_path / f"{lines}/journal.jsonl"
        path.parent.mkdir()
        with Journal(path) as journal:
            journal.append("intent", "first")
            interrupted = False
            try:
                sys.settrace(interrupt_after(lines))
                journal.append("result", "second")
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(None)
            journal.append("note", "third")
        names = [event.step for event in read_events(path)]
        assert names in (["first", "third"], ["first", "second", "third"])
        if not interrupted:
            break
    assert lines > 20


def interrupt_after(lines: int) -> Callable[..., Any]:
    """A trace function that raises at the given line of code of the journal's own files."""
    left = lines

    def trace(frame: FrameType, kind: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (journal_file, durable_file):
            return None
        if kind == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace


journal_file, durable_file = patcher.runs.journal.__file__, patcher.runs.durable.__file__
