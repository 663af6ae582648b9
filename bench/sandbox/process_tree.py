"""Every process below one, however it was started: what `/proc` says of parents and memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def descendants(pid: int) -> set[int]:
    """The process and all below it; empty where it is gone."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = set[int](), [pid] if _stat(pid) else []
    while todo:
        each = todo.pop()
        found.add(each)
        todo += children.get(each, [])
    return found


def send(pid: int, number: signal.Signals) -> None:
    """A signal to each of them."""
    _signal(descendants(pid), number)


def kill(pid: int) -> None:
    """Kill them all, stopped first, so that none forks while the others die."""
    send(pid, signal.SIGSTOP)
    send(pid, signal.SIGKILL)


def kill_all(pids: Iterable[int]) -> None:
    """Kill these processes; those that are gone are no error."""
    _signal(pids, signal.SIGKILL)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for each in pids:
        try:
            os.kill(each, number)
        except ProcessLookupError:
            continue


def memory_bytes(pid: int) -> int:
    """What they hold together, which no limit of one process bounds."""
    return sum(map(_resident_bytes, descendants(pid)))


def _resident_bytes(pid: int) -> int:
    """Memory that it holds now; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def _stat(pid: int) -> list[str] | None:
    """What follows the name, which may hold anything: state, parent, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
