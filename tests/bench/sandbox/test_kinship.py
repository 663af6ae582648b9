"""Descendants of a process, where each other process is looked at once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from patcher.bench.sandbox import process_tree as tree
from patcher.bench.sandbox.process_tree import Kinship

BORN = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(36, 1)  # orphans below come to this process
def say(word):
    os.write(1, word)
    sys.stdin.buffer.read(1)
say(b"a")
if os.fork() == 0:
    time.sleep(600)
say(b"b")
between = os.fork()
if between == 0:
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    os._exit(0)
os.waitpid(between, 0)
say(b"c")
"""
ROOT = 40


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BORN], stdin=pipe, stdout=pipe) as found:
        try:
            yield found
        finally:
            tree.kill(found.pid)


def test_who_is_born_later_is_found_and_a_daemon_too(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdin is not None
    kin = Kinship(process.pid)
    for size in (1, 2, 3):
        process.stdout.read(1)
        for _ in range(2):
            found = kin.descendants()
            assert found == tree.descendants(process.pid)
            assert len(found) == size
        if size < 3:
            process.stdin.write(b".")
            process.stdin.flush()
    tree.kill(process.pid)
    process.wait()
    assert kin.descendants() == set()


def test_strangers_are_looked_at_once(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = tree.parent_of

    def parent_of(pid: int) -> int | None:
        asked.append(pid)
        return real(pid)

    monkeypatch.setattr(tree, "parent_of", parent_of)
    kin = Kinship(process.pid)
    kin.descendants()
    assert os.getpid() in asked
    asked.clear()
    assert process.pid in kin.descendants()
    assert process.pid in asked
    assert os.getpid() not in asked


class Proc:
    """Processes as `/proc` shows them: inode and parent, by id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: dict[int, tuple[int, int]] = {}
        self.dies: set[int] = set()
        """Processes that end before they are looked at."""
        monkeypatch.setattr(tree, "parent_of", self._parent_of)
        monkeypatch.setattr(os, "scandir", self._scandir)

    def _parent_of(self, pid: int) -> int | None:
        return None if pid in self.dies else self.shown[pid][1]

    @contextlib.contextmanager
    def _scandir(self, _: str) -> Iterator[list[Entry]]:
        yield [Entry("self", 1), *(Entry(str(pid), each[0]) for pid, each in self.shown.items())]


class Entry:
    def __init__(self, name: str, inode: int) -> None:
        self.name, self._inode = name, inode

    def inode(self) -> int:
        return self._inode


BEFORE: Mapping[int, tuple[int, int]] = {1: (101, 0), 30: (130, 1), ROOT: (140, 30), 50: (150, 30)}


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch) -> Proc:
    found = Proc(monkeypatch)
    found.shown = dict(BEFORE)
    return found


def test_another_process_with_a_strangers_id_is_looked_at(proc: Proc) -> None:
    kin = Kinship(ROOT)
    assert kin.descendants() == {ROOT}
    proc.shown[50] = (999, ROOT)
    assert kin.descendants() == {ROOT, 50}
    proc.shown[60] = (160, 50)
    assert kin.descendants() == {ROOT, 50, 60}


def test_an_orphan_without_known_ancestors_is_no_stranger(proc: Proc) -> None:
    """Its parent ended between two looks at files, and it is the root's child from then on."""
    kin = Kinship(ROOT)
    proc.shown |= {60: (160, ROOT), 61: (161, 60), 62: (162, 61)}
    proc.dies = {60}
    assert kin.descendants() == {ROOT}
    del proc.shown[60]
    proc.dies = set()
    proc.shown[61] = (161, ROOT)
    assert kin.descendants() == {ROOT, 61, 62}


def test_no_loop_of_parents_keeps_the_judge(proc: Proc) -> None:
    proc.shown |= {70: (170, 71), 71: (171, 70)}
    assert Kinship(ROOT).descendants() == {ROOT}


def test_a_root_that_ended_has_no_descendants(proc: Proc) -> None:
    kin = Kinship(ROOT)
    proc.shown[60] = (160, ROOT)
    assert kin.descendants() == {ROOT, 60}
    del proc.shown[ROOT]
    assert kin.descendants() == set()


def test_the_innermost_process_is_at_the_end_of_a_chain(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    process.stdout.read(1)
    assert tree.innermost(process.pid) == process.pid
    assert process.stdin is not None
    process.stdin.write(b".")
    process.stdin.flush()
    process.stdout.read(1)
    [child] = tree.descendants(process.pid) - {process.pid}
    assert tree.innermost(process.pid) == tree.innermost(child) == child
