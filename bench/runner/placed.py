"""Device memory at addresses that another process can have, too.

CUDA's virtual memory management maps memory at chosen addresses. Two processes that map at the same
ones can run the same kernels with the same parameters, while neither sees the memory of the other.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from .driver import RELAXED, CudaDriver, CudaError

BASES = (0x2000_0000_0000, 0x1000_0000_0000, 0x4000_0000_0000, 0x200_0000_0000, 0x80_0000_0000)
"""Addresses that neither Linux nor CUDA uses of itself, in the order in which they are tried. If
none is free, the driver chooses."""
ROOM = 1 << 37
"""Bytes of addresses that are reserved; memory is put behind those that are used."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class PlacedMemory:
    """Memory at addresses of one reserved range.

    Raises:
        CudaError: no addresses are left.
    """

    def __init__(self, driver: CudaDriver, bases: Sequence[int] = BASES, room: int = ROOM) -> None:
        self._driver = driver
        self.granularity = driver.granularity()
        self.base, self.room = reserve_one_of(driver, bases, room), room
        self._next, self._end = self.base, self.base + room
        self.spans: dict[int, int] = {}
        """Sizes in bytes by address."""

    def take(self, size: int) -> int:
        """Put memory behind addresses that were never used; return the first one."""
        size = up(size, self.granularity)
        if self._next + size > self._end:
            raise CudaError(f"no addresses are left for {size} bytes")
        address = self._next
        self._driver.back(address, size)
        self._next += size
        self.spans[address] = size
        return address

    def give_back(self, address: int) -> None:
        """Give the memory that begins at an address back."""
        self._driver.unback(address, self.spans.pop(address))

    def tensor(self, size: int) -> Any:
        """A tensor of bytes, uint8, that keeps its memory."""
        return bytes_at(self.take(size), size)


class Pool:
    """A pool of PyTorch's allocator whose segments lie in placed memory."""

    def __init__(self, driver: CudaDriver, memory: PlacedMemory) -> None:
        import torch

        self._driver, self._memory = driver, memory
        self.segments: dict[int, int] = {}
        """Sizes in bytes by address."""
        self.failed = ""
        # PyTorch keeps the addresses only
        self._functions = (_Allocate(self._allocate), _Free(self._free))
        allocate, free = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._functions)
        self._allocator = torch._C._cuda_customAllocator(allocate, free)
        self._pool = torch.cuda.MemPool(self._allocator)
        self.id = self._pool.id

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let this thread's new tensors lie in the pool."""
        import torch

        with torch.cuda.use_mem_pool(self._pool):
            yield

    def _allocate(self, size: int, _device: int, _stream: int | None) -> int:
        with self._any_time():
            try:
                address = self._memory.take(size)
            except CudaError as error:
                self.failed = str(error)  # PyTorch reports that it is out of memory
                return 0
        self.segments[address] = self._memory.spans[address]
        return address

    def _free(self, address: int, _size: int, _device: int, _stream: int | None) -> None:
        with self._any_time():
            self._driver.call("cuCtxSynchronize")
            self._memory.give_back(address)
        del self.segments[address]

    @contextlib.contextmanager
    def _any_time(self) -> Iterator[None]:
        """Allow calls that a stream's capture forbids by default."""
        mode = ctypes.c_int(RELAXED)
        self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


class CopiedMemory:
    """Memory of another process at its addresses, in this one.

    Args:
        driver: the driver.
        rooms: ranges [address, bytes] that the other process reserved as a whole.
        spans: where it has memory, within these ranges or elsewhere.

    Raises:
        CudaError: some of the addresses are taken in this process.
    """

    def __init__(
        self,
        driver: CudaDriver,
        rooms: Sequence[Sequence[int]],
        spans: Sequence[Sequence[int]],
    ) -> None:
        self._driver = driver
        self._reserved: list[tuple[int, int]] = []
        self._backed: list[tuple[int, int]] = []
        try:
            for address, size in rooms:
                self._reserve(address, size, (1,))
            for address, size in merged(spans, driver.granularity()):
                if not self._holds(address, size):
                    whole = 1 << (size - 1).bit_length()
                    self._reserve(address, size, (driver.granularity(), whole, 1 << 30))
                driver.back(address, size)
                self._backed.append((address, size))
        except CudaError:
            self.close()
            raise

    def close(self) -> None:
        """Give memory and addresses back."""
        for address, size in self._backed:
            self._driver.unback(address, size)
        for address, size in self._reserved:
            self._driver.unreserve(address, size)
        self._backed, self._reserved = [], []

    def _holds(self, address: int, size: int) -> bool:
        return any(
            begin <= address and address + size <= begin + room for begin, room in self._reserved
        )

    def _reserve(self, address: int, size: int, units: Sequence[int]) -> None:
        """Reserve addresses, or more around them, in multiples of one of the units.

        The driver does not give each range that is free, but larger ones.
        """
        instead = 0
        for unit in units:
            begin, end = address // unit * unit, up(address + size, unit)
            instead = self._driver.reserve(begin, end - begin)
            if instead == begin:
                self._reserved.append((begin, end - begin))
                return
            self._driver.unreserve(instead, end - begin)
        raise CudaError(
            f"addresses {address:#x} + {size:#x} are taken in this process: {instead:#x} instead"
        )


class _Bytes:
    """Memory as other libraries describe it to PyTorch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_at(address: int, size: int) -> Any:
    """A tensor over device memory, uint8; it does not own the memory."""
    import torch

    return torch.as_tensor(_Bytes(address, size), device="cuda")


def merged(spans: Sequence[Sequence[int]], granularity: int) -> list[tuple[int, int]]:
    """Spans (address, bytes) at whole multiples of the granularity that cover all of these."""
    covered: list[list[int]] = []
    for address, size in sorted(map(tuple, spans)):
        begin, end = address // granularity * granularity, up(address + size, granularity)
        if covered and begin <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], end)
        else:
            covered.append([begin, end])
    return [(begin, end - begin) for begin, end in covered]


def up(size: int, granularity: int) -> int:
    """The next multiple, at least one."""
    return max(-(-size // granularity), 1) * granularity


def reserve_one_of(driver: CudaDriver, bases: Sequence[int], room: int) -> int:
    """Reserve addresses at the first base that is free, or where the driver chooses."""
    for base in bases:
        try:
            got = driver.reserve(base, room)
        except CudaError:
            continue  # the next may be free
        if got == base:
            return base
        driver.unreserve(got, room)
    return driver.reserve(0, room)
