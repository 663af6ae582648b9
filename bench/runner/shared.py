"""Device memory that the judge shares with a runner, so that bytes need not pass through the host.

The judge writes there what a command reads, and reads what a command left. Neither computes in it,
both copy, and the judge checks its own copy. The judge creates it, and the runner opens it by a
file descriptor before any foreign code (CUDA's virtual memory management). What does not fit into
it goes through files in memory.
"""

from __future__ import annotations

import os
from typing import Any

from .driver import CudaDriver
from .placed import bytes_at, up

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
        self._driver = driver
        self.size = up(size, driver.granularity())
        if descriptor is None:
            memory = driver.create(self.size)
        else:
            memory = driver.opened(descriptor)
            os.close(descriptor)
        try:
            self.pointer = self._reserved()
            try:
                driver.map(self.pointer, self.size, memory)
                self.descriptor = driver.descriptor(memory) if descriptor is None else -1
            except BaseException:
                self._driver.unreserve(self.pointer, self.size)
                raise
        finally:
            driver.release(memory)  # mappings and descriptors keep it
        self.bytes = bytes_at(self.pointer, self.size)

    def _reserved(self) -> int:
        """Addresses for it, at a base if one is free."""
        for base in BASES:
            if (got := self._driver.reserve(base, self.size)) == base:
                return got
            self._driver.unreserve(got, self.size)
        return self._driver.reserve(0, self.size)

    def rows(self, sets: int, set_bytes: int) -> Any:
        """The first bytes as a tensor, uint8 [sets, set_bytes]."""
        return self.bytes[: sets * set_bytes].view(sets, set_bytes)

    def close(self) -> None:
        """Give memory, addresses and descriptor back, on the side that created it; nothing on the
        device may use it any more."""
        self._driver.unback(self.pointer, self.size)
        self._driver.unreserve(self.pointer, self.size)
        os.close(self.descriptor)


def goes_through(memory: SharedMemory | None, size: int) -> SharedMemory | None:
    """The memory, if this many bytes of a command go through it; judge and runner ask alike."""
    return memory if memory is not None and size <= memory.size else None
