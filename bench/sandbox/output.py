"""What programs of strangers print: read to the end, kept in part."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

KEPT_BYTES = 1 << 20
"""Of a stream: half its head, half its tail."""
WATCH_S = 0.2
"""Seconds between two looks at a program that runs."""


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

    After an exception the caller kills it. A process that outlives that and holds the pipes makes
    nobody wait.

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
    deadline, look = time.monotonic() + timeout_s, time.monotonic() + WATCH_S
    pipes = [
        (pipe, kept)
        for pipe, kept in zip((process.stdout, process.stderr), found, strict=True)
        if pipe is not None
    ]
    with ExitStack() as stack:
        readable = stack.enter_context(selectors.DefaultSelector())
        for pipe, kept in pipes:
            readable.register(stack.enter_context(pipe), selectors.EVENT_READ, kept)
        while readable.get_map() or process.poll() is None:
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
