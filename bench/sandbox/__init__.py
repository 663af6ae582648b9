"""Sandboxing of processes: what they may access, and how they are ended. Here: what they leave.

Files and folders that foreign code could have written are read without being led elsewhere, and
removed however they were left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 1 << 30
"""Of a file that is read: as many as a compiler may write."""


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
