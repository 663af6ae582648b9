"""Anonymous files for bytes between judge and runner."""

from __future__ import annotations

import fcntl
import os

from patcher.bench.judge.blob import Bytes

CAPACITY = 1 << 30
"""Most bytes of inputs, or outputs, of one command; memory is allocated as it is written."""


def memory_file(name: str, capacity: int = CAPACITY) -> int:
    """A descriptor of a file without a path that nobody can shrink under a reader."""
    descriptor = os.memfd_create(f"patcher-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, capacity)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def write_at_start(descriptor: int, data: Bytes) -> None:
    """Write all of the data.

    Raises:
        ValueError: it exceeds `CAPACITY`, which `judge.planning` should prevent.
    """
    if data.nbytes > CAPACITY:
        raise ValueError(f"{data.nbytes} bytes for one command, at most {CAPACITY} allowed")
    view, at = data.data.cast("B"), 0
    while at < data.nbytes:
        at += os.pwrite(descriptor, view[at:], at)


def read_from_start(descriptor: int, data: Bytes) -> None:
    """Fill `data`.

    Raises:
        ValueError: the file is shorter.
    """
    view, at = data.data.cast("B"), 0
    while at < data.nbytes:
        count = os.preadv(descriptor, [view[at:]], at)
        if count <= 0:
            raise ValueError("the runner's outputs are cut off")
        at += count
