"""Anonymous files for bytes between judge and runner.

On a CPU one of them holds the buffer sets, which both sides share. The judge writes values into
them, and reads what came of them, only while the runner is stopped. So no value is seen before the
judge's clock runs, and nothing is written after it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from patcher.bench.judge.blob import Bytes, Layout, equal
from patcher.bench.runner.mixing import PIECE_BYTES

CAPACITY = 3 << 30
"""Most bytes of inputs, or outputs, of one command; memory is allocated as it is written."""

READERS = 4
"""Threads that read a large block."""
SETS_CAPACITY = 1 << 36
"""Most bytes of all sets of one runner; memory is allocated as it is written."""


def memory_file(name: str, capacity: int = CAPACITY) -> int:
    """A descriptor of a file without a path that nobody can shrink under a reader."""
    descriptor = os.memfd_create(f"patcher-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, capacity)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def require_room(size: int) -> None:
    """Check that one command may have that many bytes.

    Raises:
        ValueError: it exceeds `CAPACITY`, which `judge.planning` should prevent.
    """
    if size > CAPACITY:
        raise ValueError(f"{size} bytes for one command, at most {CAPACITY} allowed")


def write_at_start(descriptor: int, data: Bytes) -> None:
    """Write all of the data; see `require_room`."""
    require_room(data.nbytes)
    view, at = data.numpy().data, 0
    while at < data.nbytes:
        at += os.pwrite(descriptor, view[at:], at)


def read_from_start(descriptor: int, data: Bytes, begin: int = 0) -> None:
    """Fill `data` with the file's bytes from `begin` on.

    Raises:
        ValueError: the file is shorter.
    """
    view, at = data.numpy().data, 0
    while at < data.nbytes:
        count = os.preadv(descriptor, [view[at:]], begin + at)
        if count <= 0:
            raise ValueError("the runner's outputs are cut off")
        at += count


def read_summed(descriptor: int, data: Bytes) -> list[int]:
    """Fill `data`, and return the checksums of what is there, see `runner.mixing`. Several
    threads do it, since new memory and checksums take longer than the bytes of a large block.

    Raises:
        ValueError: the file is shorter.
    """

    def summed(at: int) -> int:
        piece = data[at : at + PIECE_BYTES]
        read_from_start(descriptor, piece, at)
        return zlib.crc32(piece.numpy().data)

    places = range(0, data.nbytes, PIECE_BYTES)
    if len(places) == 1:
        return [summed(0)]
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(summed, places))


@dataclass(frozen=True)
class Left:
    """Contents of the buffers after a block of calls."""

    blocks: Bytes
    """Returned bytes, uint8 of shape [sets, returned_bytes], on the device that is judged."""
    key: int = 0
    """Key of the digests, drawn after the calls."""
    digests: object = None
    """Keyed digests of each watched tensor of each set. Untrusted: the runner may send anything."""
    whole: Bytes | None = None
    """In place of digests, where the judge sees the buffers: all bytes, [sets, set_bytes]. They
    hold until the runner's next command."""
    late: bool = False
    """Whether something changed after the call had returned; the blocks are from before."""


class SharedSets:
    """The judge's view of a file in memory that holds the sets of a runner on a CPU.

    Each set begins at a page, and the runner maps each by itself.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self._memory: Bytes | None = None

    def left(self, plan: Layout, count: int) -> Left:
        """What `count` sets hold; the runner must be stopped."""
        sets = self.rows(plan, count)
        return Left(sets[:, : plan.returned_bytes].clone(), whole=sets)

    def kept(self, plan: Layout, count: int, order: Sequence[int]) -> Left:
        """The same, for a runner that kept the sets of `order` as their calls left them."""
        left = self.left(plan, count)
        kept = self.rows(plan, 2 * count)[count:, : plan.returned_bytes]
        called = list(order)
        late = not equal(kept[called], left.blocks[called])
        left.blocks[called] = kept[called]
        return replace(left, late=late)

    def rows(self, plan: Layout, count: int) -> Bytes:
        """The bytes of the sets, [count, set_bytes], to be filled while the runner is stopped."""
        pitch = -(-plan.set_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = max(pitch * count, mmap.PAGESIZE)
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return self._memory[: pitch * count].view(count, pitch)[:, : plan.set_bytes]
