"""The journal: chain, torn lines, damage, the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import UsageError, VerificationError
from patcher.journal import GENESIS, Journal, fold, read_events


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


def test_second_writer_is_refused_and_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from patcher.journal import Journal\n"
            "j = Journal(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()",
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"process {child.pid}") as caught:
            Journal(path)
        assert str(child.pid) in caught.value.hint
        assert read_events(path) == []  # looking takes no lock
    finally:
        child.kill()
        child.communicate()
    with Journal(path) as journal:  # the kernel freed the dead writer's lock
        journal.append("note", "run")


def test_same_process_cannot_write_twice_either(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path), pytest.raises(UsageError, match=str(os.getpid())):
        Journal(path)
    Journal(path).close()
