"""The tree of processes below a process, with signals and memory, from `/proc`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
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


class CpuClock:
    """The CPU time of a process tree over a span, by the kernel's count.

    Threads that ended in the span are counted. A process that was forked in it and has ended is
    not, unless its parent waited for it, and then in clock ticks (10 ms).
    """

    def __init__(self, pid: int) -> None:
        """Begin the span."""
        self._pid = pid
        self._known = descendants(pid)
        self._begin = time.perf_counter()
        self._before = {each: _cpu_s(each) for each in self._known}

    def stop(self) -> tuple[float, float]:
        """End the span.

        Returns:
            CPU time and length of the span, in seconds.
        """
        used = sum(_cpu_s(each, before) for each, before in self._before.items())
        used -= sum(self._before.values())
        span = time.perf_counter() - self._begin
        return used + sum(map(_cpu_s, descendants(self._pid) - self._known)), span


def _cpu_s(pid: int, ended: float = 0.0) -> float:
    """CPU time of a process in seconds; `ended` if it has ended."""
    fields = _stat(pid)
    try:
        own = time.clock_gettime(_cpu_clock(pid))
    except OSError:
        return ended
    waited = int(fields[13]) + int(fields[14]) if fields else 0  # in clock ticks, of its children
    return own + max(waited - 2, 0) / os.sysconf("SC_CLK_TCK")  # each may be a tick too late


def _cpu_clock(pid: int) -> int:
    """The CPU clock of another process, as `clock_getcpuclockid` computes it on Linux."""
    return (~pid << 3) | 2


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Pin every thread of a process tree to these CPUs."""
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, cpus)


def cpus_allowed(pid: int) -> set[int]:
    """CPUs on which any thread of a process tree may run."""
    allowed: set[int] = set()
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            allowed |= os.sched_getaffinity(thread)
    return allowed


def _threads(pid: int) -> list[int]:
    threads: list[int] = []
    for each in descendants(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads += map(int, os.listdir(f"/proc/{each}/task"))
    return threads


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
