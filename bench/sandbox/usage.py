"""What a process tree holds, in memory and on disk, whether a process maps it or not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from patcher.bench.sandbox.process_tree import descendants

CHANNEL_BYTES = 416 << 10
"""Most bytes that wait in a pipe or a socket, by the kernel's defaults. A user's pipes hold 64 MiB
together, and little more."""
MOST_ENTRIES = 1 << 16
"""Of a folder: files and folders that are counted."""


class OverLimitError(Exception):
    """A process tree holds more than it may; the message says what, without its subject's name."""


def demand_within(
    most_bytes: int, pid: int, folder: Path | None = None, files: Iterable[int] = ()
) -> None:
    """Check what a process tree holds.

    That is: the memory that it maps with its page tables, files in memory and files without a name
    that are open in it, the most that its pipes and sockets may hold, and its folder. `rlimit`s
    count each process alone, and only what it maps.

    Args:
        most_bytes: its limit.
        pid: its root.
        folder: a folder that it may write to.
        files: descriptors of ours, of files in memory that it may write to.

    Raises:
        OverLimitError: it holds more, or its folder cannot be measured.
    """
    mapped, shared, channels = 0, 0, set[str]()
    held: dict[tuple[int, int], int] = {}
    for each in map(os.fstat, files):
        held[each.st_dev, each.st_ino] = each.st_blocks * 512
    for process in descendants(pid):
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
