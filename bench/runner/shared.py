"""Device memory that the judge shares with a runner, so that bytes need not pass through the host.

The judge writes there what a command reads, and reads what a command left. Neither computes in it,
both copy, and the judge checks its own copy. The judge creates it, and the runner opens it by a
file descriptor before any foreign code (CUDA's virtual memory management). What does not fit into
it goes through files in memory.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from .driver import CudaDriver
from .placed import bytes_at, reserve_one_of, up

BASES = (0x3000_0000_0000, 0x3800_0000_0000)
"""Addresses that neither Linux, CUDA nor the memory of carried calls uses of itself."""


class SharedMemory:
    """Device memory of two processes, mapped here.

    Args:
        driver: the driver, in a process that has initialised the device.
        size: bytes, rounded up to what the driver maps.
        descriptor: of memory that another process created, closed here; None: create it.

    Raises:
        CudaError: the driver or this machine cannot do that.
    """

    def __init__(self, driver: CudaDriver, size: int, descriptor: int | None = None) -> None:
        self._driver, self.descriptor = driver, -1
        with contextlib.ExitStack() as stack:
            if descriptor is not None:
                stack.callback(os.close, descriptor)
            self.size = up(size, driver.granularity())
            memory = driver.create(self.size) if descriptor is None else driver.opened(descriptor)
            stack.callback(driver.release, memory)  # mappings and descriptors keep it
            self.pointer = reserve_one_of(driver, BASES, self.size)
            with contextlib.ExitStack() as undo:
                undo.callback(driver.unreserve, self.pointer, self.size)
                driver.map(self.pointer, self.size, memory)
                undo.callback(driver.unback, self.pointer, self.size)
                self.bytes = bytes_at(self.pointer, self.size)
                if descriptor is None:
                    self.descriptor = driver.descriptor(memory)
                undo.pop_all()

    def rows(self, sets: int, set_bytes: int) -> Any:
        """The first bytes as a tensor, uint8 [sets, set_bytes]."""
        return self.bytes[: sets * set_bytes].view(sets, set_bytes)

    def close(self) -> None:
        """Give memory, addresses and descriptor back, on the side that created it; nothing on the
        device may use it any more."""
        with contextlib.ExitStack() as stack:  # each, whatever fails
            stack.callback(os.close, self.descriptor)
            stack.callback(self._driver.unreserve, self.pointer, self.size)
            stack.callback(self._driver.unback, self.pointer, self.size)


def goes_through(memory: SharedMemory | None, size: int) -> SharedMemory | None:
    """The memory, if this many bytes of a command go through it; judge and runner ask alike."""
    return memory if memory is not None and size <= memory.size else None
