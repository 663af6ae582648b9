"""The tree of processes below a process, with signals and memory, from `/proc`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def descendants(pid: int) -> set[int]:
    """Ids of a process and all its descendants; empty if it has ended."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    pids, todo = set[int](), [pid] if _stat(pid) else []
    while todo:
        each = todo.pop()
        pids.add(each)
        todo += children.get(each, [])
    return pids


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all its descendants."""
    _signal(descendants(pid), number)


def kill(pid: int) -> None:
    """Kill a process tree. All are stopped first, so that none forks while others die."""
    send(pid, signal.SIGSTOP)
    send(pid, signal.SIGKILL)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes; those that have ended are ignored."""
    _signal(pids, signal.SIGKILL)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for each in pids:
        try:
            os.kill(each, number)
        except ProcessLookupError:
            continue


def memory_bytes(pid: int) -> int:
    """Resident memory of a process tree in bytes."""
    return sum(map(_resident_bytes, descendants(pid)))


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def _stat(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` after the name (state, parent, ...); None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
