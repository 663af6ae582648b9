"""The tree of processes below a process: signals and CPU time, from `/proc`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

WORKED = 0.25
"""Share of the busiest thread's CPU time above which another worked and was not only woken."""


def descendants(pid: int) -> set[int]:
    """Ids of a process and all its descendants; empty if it has ended."""
    return below(pid, parents())


def innermost(pid: int) -> int:
    """The process at the end of a chain of only children, such as a confined program's."""
    children = children_of(parents())
    while pid in children:
        pid = children[pid][0]
    return pid


def parents() -> dict[int, int]:
    """The parent of each process, by their ids."""
    found = {int(name): parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: parent for pid, parent in found.items() if parent is not None}


def parent_of(pid: int) -> int | None:
    """Id of a process' parent; None if it has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children_of(parents: Mapping[int, int]) -> dict[int, list[int]]:
    """The children of each process that has any."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    return children


def below(pid: int, parents: Mapping[int, int]) -> set[int]:
    """A process and all its descendants, by the parents of all; empty if it is not there."""
    children, pids = children_of(parents), set[int]()
    todo = [pid] if pid in parents else []
    while todo:
        each = todo.pop()
        pids.add(each)
        todo += children.get(each, [])
    return pids


class Kinship:
    """Tells the descendants of a process from all others, of which each is looked at once.

    A process that is no descendant never becomes one: a new parent is always an ancestor of the
    former. A process that got the id of another has another folder in `/proc`, by its inode.

    Args:
        pid: the root.
    """

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._strangers: dict[int, int] = {}
        """Inodes of the folders of those that are no descendants, by their ids."""

    def descendants(self) -> set[int]:
        """Ids of the process and all its descendants; empty if it has ended."""
        strangers: dict[int, int] = {}
        inodes: dict[int, int] = {}
        parents: dict[int, int] = {}
        with os.scandir("/proc") as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                pid, inode = int(entry.name), entry.inode()
                if self._strangers.get(pid) == inode:
                    strangers[pid] = inode
                elif (parent := parent_of(pid)) is not None:
                    inodes[pid], parents[pid] = inode, parent
        found = below(self._root, parents)
        for pid in parents.keys() - found:
            if _comes_from_elsewhere(pid, parents, strangers):
                strangers[pid] = inodes[pid]
        self._strangers = strangers
        return found


def _comes_from_elsewhere(
    pid: int, parents: Mapping[int, int], strangers: Mapping[int, int]
) -> bool:
    """Whether a process that is not below the root has ancestors up to the first, or to a stranger.

    One whose parent ended while all were looked at may be below the root all the same.
    """
    for _ in parents:
        if pid not in parents:
            break
        pid = parents[pid]
    return pid == 0 or pid in strangers


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all its descendants."""
    signal_all(descendants(pid), number)


def stop(pid: int, timeout_s: float = 10.0) -> set[int]:
    """Stop a process tree, and wait until each of its threads has stopped or ended.

    Returns:
        Ids of its processes.

    Raises:
        TimeoutError: a thread still runs after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    stopped: set[int] = set()
    while True:
        before = _last_id()
        found = descendants(pid)
        signal_all(found - stopped, signal.SIGSTOP)
        while not all(map(_at_rest, found)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} does not stop")
            time.sleep(0)
        if found <= stopped or _last_id() == before:  # none was forked while they stopped
            return found
        stopped |= found


def _at_rest(pid: int) -> bool:
    """Whether all threads of a process have stopped or ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return True
    states = [_fields(f"/proc/{pid}/task/{thread}/stat") for thread in threads]
    return all(fields is None or fields[0] in "TtZX" for fields in states)


def kill(pid: int) -> None:
    """Kill a process tree. All are stopped first, so that none forks while others die."""
    send(pid, signal.SIGSTOP)
    send(pid, signal.SIGKILL)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes; those that have ended are ignored."""
    signal_all(pids, signal.SIGKILL)


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that have ended are ignored."""
    for each in pids:
        try:
            os.kill(each, number)
        except ProcessLookupError:
            continue


@dataclass(frozen=True)
class CpuTime:
    """What a stopped process tree has used so far, by the kernel's count."""

    used_s: dict[int, float]
    """CPU time in seconds of each process, over its threads, those that ended, and the children
    that it waited for (these in clock ticks of 10 ms)."""
    waited_s: float
    """Seconds in which the main thread of `main` was ready to run, and another thread ran."""
    last_id: str
    """The last id that the kernel gave to a process or a thread."""

    @classmethod
    def of(cls, pids: Iterable[int], main: int) -> CpuTime:
        """Read the clocks of stopped processes; `main` is one of them."""
        return cls({pid: _cpu_s(pid) for pid in pids}, waited_s(main), _last_id())

    def since(self, before: CpuTime) -> tuple[float, float]:
        """CPU time in seconds since then, and seconds that `main` waited for a CPU.

        A child that nobody waits for leaves no trace when it ends, so no wait is told where a
        process or a thread was begun anywhere on the machine.
        """
        used = sum(self.used_s.values()) - sum(before.used_s.get(pid, 0.0) for pid in self.used_s)
        waited = self.waited_s - before.waited_s if self.last_id == before.last_id else 0.0
        return used, waited

    def lost(self, before: CpuTime) -> set[int]:
        """Processes that ended since then and are gone, with the CPU time that they used."""
        return before.used_s.keys() - self.used_s.keys()


def _cpu_s(pid: int) -> float:
    """CPU time of a process in seconds; 0 if it has ended and is gone."""
    fields = _stat(pid)
    if fields is None:
        return 0.0
    tick = os.sysconf("SC_CLK_TCK")
    waited = (int(fields[13]) + int(fields[14])) / tick  # of its children
    try:
        return time.clock_gettime(_cpu_clock(pid)) + waited
    except OSError:  # it has ended, and nobody has waited for it
        return (int(fields[11]) + int(fields[12])) / tick + waited


def _cpu_clock(pid: int) -> int:
    """The CPU clock of another process, as `clock_getcpuclockid` computes it on Linux."""
    return (~pid << 3) | 2


def waited_s(thread: int) -> float:
    """Seconds that a thread was ready to run and did not; 0 where the kernel does not count."""
    return _scheduled_s(thread)[1]


def _scheduled_s(thread: int) -> tuple[float, float]:
    """Seconds that a thread ran, and that it was ready to run and did not."""
    try:
        with open(f"/proc/{thread}/schedstat", encoding="ascii") as file:
            used, waited = file.read().split()[:2]
    except (FileNotFoundError, ProcessLookupError, ValueError):  # it ended, or the file is empty
        return 0.0, 0.0
    return int(used) / 1e9, int(waited) / 1e9


@dataclass(frozen=True)
class ThreadTime:
    """What a thread has done so far, by the kernel's count."""

    used_s: float
    """Seconds in which it ran."""
    waited_s: float
    """Seconds in which it was ready to run, and something else ran."""


def thread_times(pids: Iterable[int]) -> dict[int, ThreadTime]:
    """Of each thread of processes, by its id; zeros where the kernel does not count."""
    return {thread: ThreadTime(*_scheduled_s(thread)) for thread in _threads(pids)}


def held_up_s(before: Mapping[int, ThreadTime], now: Mapping[int, ThreadTime]) -> float:
    """Longest wait in seconds of one thread that worked meanwhile.

    Threads of an idle pool wait, too, when their stopped process goes on, and hold nobody up.
    """
    none = ThreadTime(0.0, 0.0)
    spent = [
        (each.used_s - old.used_s, each.waited_s - old.waited_s)
        for thread, each in now.items()
        for old in (before.get(thread, none),)
    ]
    least = WORKED * max((used for used, _ in spent), default=0.0)
    return max((waited for used, waited in spent if used > least), default=0.0)


def _last_id() -> str:
    with open("/proc/loadavg", encoding="ascii") as file:
        return file.read().split()[-1]


def pin(pids: Iterable[int], cpus: Iterable[int]) -> None:
    """Pin every thread of processes to these CPUs."""
    for thread in _threads(pids):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, cpus)


def cpus_allowed(pids: Iterable[int]) -> set[int]:
    """CPUs on which any thread of processes may run."""
    allowed: set[int] = set()
    for thread in _threads(pids):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            allowed |= os.sched_getaffinity(thread)
    return allowed


def _threads(pids: Iterable[int]) -> list[int]:
    threads: list[int] = []
    for each in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads += map(int, os.listdir(f"/proc/{each}/task"))
    return threads


def _stat(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` after the name (state, parent, ...); None if it has ended."""
    return _fields(f"/proc/{pid}/stat")


def _fields(path: str) -> list[str] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        text = os.read(descriptor, 1 << 12)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    return text.rpartition(b")")[2].decode("ascii").split()
