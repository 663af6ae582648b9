"""Sandboxing of processes: what they may access, and how they are ended. Here: what they hold, and
what they leave.

Files and folders that foreign code could have written are read without being led elsewhere, and
removed however they were left. What it prints is read to the end, and kept in part.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

MOST_BYTES = 1 << 30
"""Of a file that is read: as many as a compiler may write."""
KEPT_BYTES = 1 << 20
"""Of a stream: half its head, half its tail."""
CHANNEL_BYTES = 416 << 10
"""Most bytes that wait in a pipe or a socket, by the kernel's defaults. A user's pipes hold 64 MiB
together, and little more."""
MOST_ENTRIES = 1 << 16
"""Of a folder: files and folders that are counted."""
WATCH_S = 0.2
"""Seconds between two looks at a program that runs."""


def plain_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes | None:
    """At most that many bytes of a file; None if it is absent, a link, a pipe or unreadable."""
    try:
        # a pipe must not make us wait for its writer
        place = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(place, "rb") as file:
        return file.read(most_bytes) if stat.S_ISREG(os.fstat(place).st_mode) else None


@contextlib.contextmanager
def strangers_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """A new folder for foreign code, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder that a stranger filled, however deep it is nested; what resists stays.

    Each inner folder is first moved to the top, so that no path is long and nothing recurses.
    """
    top = str(folder)
    todo = [top]
    while todo:
        place = todo.pop()
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(place)):
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)
                    moved = f"{top}/{secrets.token_hex(16)}"
                    os.rename(entry.path, moved)
                    todo.append(moved)
            if place != top:
                os.rmdir(place)
    with contextlib.suppress(OSError):
        os.rmdir(top)


class Excerpt:
    """Head and tail of a stream, with a note of what was left out between them.

    Args:
        data: its first part.
        most_bytes: how much is kept.
    """

    def __init__(self, data: bytes = b"", most_bytes: int = KEPT_BYTES) -> None:
        self._half = most_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self.left_out = 0
        """Bytes that were not kept."""
        self.add(data)

    @classmethod
    def of_file(cls, path: Path, most_bytes: int = KEPT_BYTES) -> Self:
        """Of a log file, of which no more than that is read."""
        with path.open("rb") as file:
            kept = cls(file.read(most_bytes // 2), most_bytes)
            size = os.fstat(file.fileno()).st_size
            kept.left_out = max(size - 2 * (most_bytes // 2), 0)
            file.seek(kept.left_out, os.SEEK_CUR)
            kept.add(file.read(most_bytes // 2))
        return kept

    def add(self, data: bytes) -> None:
        """Append the next part."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (more := len(self._tail) - self._half) > 0:
            del self._tail[:more]
            self.left_out += more

    def __bytes__(self) -> bytes:
        note = b"\n[%d bytes are left out]\n" % self.left_out if self.left_out else b""
        return bytes(self._head) + note + bytes(self._tail)

    def __str__(self) -> str:
        return bytes(self).decode("utf-8", "replace")


def run(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str], most_bytes: int
) -> tuple[int, Excerpt, Excerpt]:
    """Run a program to its end; returns its exit code, stdout and stderr.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it takes longer, and was killed.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
    )
    try:
        out, err = communicate(process, timeout_s, most_bytes=most_bytes)
        return process.wait(), out, err
    finally:
        process.kill()
        process.wait()


def communicate(
    process: subprocess.Popen[bytes],
    timeout_s: float,
    *,
    most_bytes: int = KEPT_BYTES,
    watch: Callable[[], None] | None = None,
) -> tuple[Excerpt, Excerpt]:
    """Read what a process prints on its pipes until it has ended.

    The caller kills what is left of its group, then waits for it; until then nobody else gets its
    id. A process that outlives that and holds the pipes makes nobody wait.

    Args:
        process: started with `stdout` or both as pipes.
        timeout_s: time limit in seconds.
        most_bytes: how much of each stream is kept.
        watch: called every `WATCH_S` seconds; what it raises is passed on.

    Returns:
        stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: it has not ended, or others still hold its pipes.
    """
    found = Excerpt(most_bytes=most_bytes), Excerpt(most_bytes=most_bytes)
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    deadline, look = time.monotonic() + timeout_s, time.monotonic() + WATCH_S
    pipes = [
        (pipe, kept)
        for pipe, kept in zip((process.stdout, process.stderr), found, strict=True)
        if pipe is not None
    ]
    with contextlib.ExitStack() as stack:
        readable = stack.enter_context(selectors.DefaultSelector())
        for pipe, kept in pipes:
            readable.register(stack.enter_context(pipe), selectors.EVENT_READ, kept)
        while readable.get_map() or not os.waitid(os.P_PID, process.pid, ended):
            now = time.monotonic()
            if now > deadline:
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            if watch is not None and now > look:
                watch()
                look = time.monotonic() + WATCH_S
            # closed pipes tell that it ends now
            wait_s = min(deadline - now, WATCH_S) if readable.get_map() else 0.005
            for key, _ in readable.select(wait_s):
                data = os.read(key.fd, 1 << 16)
                key.data.add(data)
                if not data:
                    readable.unregister(key.fileobj)
    return found


class OverLimitError(Exception):
    """A process tree holds more than it may; the message says what, without its subject's name."""


def demand_within(
    most_bytes: int, pids: Iterable[int], folder: Path | None = None, files: Iterable[int] = ()
) -> None:
    """Check what the processes of a tree hold.

    That is: the memory that it maps with its page tables, files in memory and files without a name
    that are open in it, the most that its pipes and sockets may hold, and its folder. `rlimit`s
    count each process alone, and only what it maps.

    Args:
        most_bytes: its limit.
        pids: its processes.
        folder: a folder that it may write to.
        files: descriptors of ours, of files in memory that it may write to.

    Raises:
        OverLimitError: it holds more, or its folder cannot be measured.
    """
    mapped, shared, channels = 0, 0, set[str]()
    held: dict[tuple[int, int], int] = {}
    for each in map(os.fstat, files):
        held[each.st_dev, each.st_ino] = each.st_blocks * 512
    for process in pids:
        sizes = _status_bytes(process)
        mapped += sizes.get("VmRSS", 0) + sizes.get("VmPTE", 0)
        shared += sizes.get("RssShmem", 0)
        for path, target in _descriptors(process):
            if target.startswith(("pipe:", "socket:")):
                channels.add(target)
            elif target.endswith(" (deleted)") and (about := _about(path)):
                held[about.st_dev, about.st_ino] = about.st_blocks * 512
    if folder is not None:
        for about in _entries(folder):
            held[about.st_dev, about.st_ino] = about.st_blocks * 512
    # what is mapped of files in memory is among what is mapped
    used = mapped + max(sum(held.values()) - shared, 0) + len(channels) * CHANNEL_BYTES
    if used > most_bytes:
        raise OverLimitError(
            f"it took {used / 2**30:.1f} GiB of memory, {most_bytes / 2**30:.1f} allowed"
        )


def _status_bytes(pid: int) -> dict[str, int]:
    """Sizes in bytes of `/proc/PID/status`; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {word[0].rstrip(":"): int(word[1]) << 10 for word in words}


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """Path and target of each open descriptor, as far as this user may see them."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return  # it has ended, or belongs to a user whose processes we may not look at
    for name in names:
        try:
            yield f"{folder}/{name}", os.readlink(f"{folder}/{name}")
        except OSError:
            continue  # it was closed


def _about(path: str) -> os.stat_result | None:
    """Facts of a plain file."""
    try:
        found = os.stat(path)
    except OSError:
        return None  # it was closed
    return found if stat.S_ISREG(found.st_mode) else None


def _entries(folder: Path) -> Iterator[os.stat_result]:
    todo, count = [str(folder)], 0
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    if (count := count + 1) > MOST_ENTRIES:
                        raise OverLimitError(f"its folder holds over {MOST_ENTRIES:,} files")
                    try:
                        yield entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
        except FileNotFoundError:
            continue  # it was removed
        except OSError as error:
            raise OverLimitError(f"its folder cannot be measured: {error.strerror}") from None
