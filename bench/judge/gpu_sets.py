"""Buffer sets on their way to a runner on a GPU, and back.

They go through device memory that both processes map, or through files in memory where the driver
cannot share it, or where they are too large (see `bench/runner/shared.py`).
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from patcher.bench.judge.blob import Bytes
from patcher.bench.judge.memory_file import read_summed, require_room
from patcher.bench.runner.driver import CudaDriver
from patcher.bench.runner.mixing import Mixer
from patcher.bench.runner.shared import SharedMemory, goes_through

SHARED_BYTES = 1 << 30
"""Most device memory that is shared with a runner."""
SHARE = 64
"""And the part of the whole that it is at most."""


class GpuSets:
    """The judge's side.

    Values are written where the runner reads them, with no copy on the way, and nothing is read
    back from there. What the runner gives is copied first, out of its reach, and then checked.

    Args:
        inputs: the file that the runner reads.
        outputs: the file that it writes.
        shared: whether to share device memory, too.
    """

    def __init__(self, inputs: int, outputs: int, shared: bool) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._mapped: Bytes | None = None
        self._memory, self.unshared = _new_memory() if shared else (None, "")
        """And why it is not shared, though it was to be."""

    @property
    def shared_bytes(self) -> int:
        """Size of the device memory that is shared; 0: all goes through files."""
        return 0 if self._memory is None else self._memory.size

    @property
    def descriptors(self) -> list[int]:
        """By which the runner opens that memory."""
        return [] if self._memory is None else [self._memory.descriptor]

    def sent(self, sets: int, set_bytes: int) -> Bytes:
        """Where the next command reads, [sets, set_bytes] on the GPU or the CPU, to be filled.

        Raises:
            ValueError: they are more than one command may have; see `require_room`.
        """
        if memory := goes_through(self._memory, sets * set_bytes):
            rows: Bytes = memory.rows(sets, set_bytes)
            return rows
        require_room(sets * set_bytes)
        if self._mapped is None:
            self._mapped = torch.frombuffer(mmap.mmap(self._inputs, 0), dtype=torch.uint8)
        return self._mapped[: sets * set_bytes].view(sets, set_bytes)

    def given(self, sets: int, set_bytes: int, key: int) -> tuple[Bytes, object]:
        """What the last command gave, [sets, set_bytes] on the GPU, and its digest or checksums."""
        size = sets * set_bytes
        if memory := goes_through(self._memory, size):
            data: Bytes = memory.bytes[:size].clone()
            return data.view(sets, set_bytes), Mixer().digest(data, key)
        data = torch.empty(size, dtype=torch.uint8)
        sums = read_summed(self._outputs, data)
        return data.cuda().view(sets, set_bytes), sums

    def unshare(self, why: str) -> None:
        """Let all go through files, since the runner cannot open the memory."""
        self.unshared = why
        memory, self._memory = self._memory, None
        if memory is not None:
            _close(memory)

    def close(self) -> None:
        """Give the memory back, once nobody holds rows."""
        self._mapped = None
        self.unshare("")


def _new_memory() -> tuple[SharedMemory | None, str]:
    """Zeros to share with a runner, or why there are none."""
    if not torch.cuda.is_available():
        return None, "no CUDA here"
    memory = None
    try:
        torch.cuda.synchronize()  # initialises the device
        if torch.cuda.current_device() != 0:
            return None, "only the first GPU's memory is shared"
        whole = torch.cuda.get_device_properties(0).total_memory
        memory = SharedMemory(CudaDriver(), min(SHARED_BYTES, whole // SHARE))
        memory.bytes.zero_()
        torch.cuda.synchronize()  # before a runner can look
    except RuntimeError as error:  # CudaError, or one of torch
        if memory is not None:
            _close(memory)
        return None, str(error)
    return memory, ""


def _close(memory: SharedMemory) -> None:
    """Give memory back, or leave it to the end of a process whose context has an error."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError):
        memory.close()
