"""A stand-in for CUDA's runtime whose device memory is the host's."""

from __future__ import annotations

import ctypes


class HostCuda:
    """Fills and copies of `patcher.bench.runner.cudart.Cuda`."""

    @staticmethod
    def fill(target: int, byte: int, size: int, stream: int) -> None:
        ctypes.memset(target, byte, size)

    @staticmethod
    def copy_async(target: int, source: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    @staticmethod
    def to_device(target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    to_host = to_device

    @staticmethod
    def synchronize() -> None:
        """Nothing runs beside."""
