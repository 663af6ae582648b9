"""The few durable acts of a run: append a line, write a file whole, take over a file left behind.

Whatever a run leaves on the disk goes through here, flushed before the next act begins. A kill
between any two of them leaves a run that can be resumed; `tests/support/killing.py` kills at each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from patcher.bench import MissingError, UsageError


def append(handle: int, content: bytes, size: int) -> int:
    """Add to a file that is `size` bytes long; returns its new length. A failed or interrupted
    write is taken back: half a line in the middle of a file would damage it.

    Raises:
        MissingError: the disk is full or broken.
    """
    if os.fstat(handle).st_size > size:
        cut(handle, size)  # interrupted after its last byte, and told to nobody
    try:
        with _on_disk("the journal"):
            _write(handle, content)
            os.fsync(handle)
    except BaseException:
        cut(handle, size)
        raise
    return size + len(content)


def cut(handle: int, size: int) -> None:
    """Drop what lies behind the first `size` bytes."""
    os.ftruncate(handle, size)
    os.fsync(handle)


def write_whole(path: Path, text: str) -> None:
    """The file with all of its text or, after a kill, as it was before.

    Raises:
        MissingError: the disk is full or broken.
    """
    with _on_disk(path.name):
        temporary = temporary_of(path)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write(handle, text.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        sync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    """Where a file is written before it is renamed: always the same, so that the next try takes
    its place."""
    return path.with_name(f".{path.name}.tmp")


def adopt(path: Path) -> None:
    """Finish a `write_whole` that was killed after its last byte."""
    temporary = temporary_of(path)
    with _on_disk(path.name):
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove the file and what a killed `write_whole` left of it."""
    there = [each for each in (path, temporary_of(path)) if each.exists()]
    for each in there:
        os.unlink(each)
    if there:
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """The folder, with those above it.

    Raises:
        MissingError: it cannot be made.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        with _on_disk(folder.name):
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable: a new or renamed file is lost in a power cut otherwise."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


@contextlib.contextmanager
def _on_disk(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MissingError(
            f"cannot write {name}: {error.strerror}",
            "check free space and permissions, then go on: patcher resume, or the command again",
        ) from error


@contextlib.contextmanager
def held_alone(path: Path, doing: str) -> Iterator[None]:
    """Hold a file, which is made if need be, so that no other process does the same beside it.

    Args:
        doing: what another process does then, for the error.

    Raises:
        UsageError: another process holds it.
    """
    with held_if_free(path) as free:
        if not free:
            raise UsageError(f"another process {doing} in {path.parent}", "wait until it has ended")
        yield


@contextlib.contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Hold a file, which is made if need be, if no other process holds it; yields whether."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when its holder dies
        except BlockingIOError:
            yield False
            return
        yield True


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file, which is made if need be; waits while another process holds it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
