"""How a runner on a GPU gets the bytes of its sets and hands them back: see `shared`."""

from __future__ import annotations

from typing import Any

from .captured import Arena
from .cudart import Cuda
from .driver import CudaDriver
from .mixing import Mixer, checksums
from .shared import SharedMemory, goes_through


def opened(offered: tuple[int, int] | None, status: dict[str, Any]) -> SharedMemory | None:
    """The memory of the judge by its descriptor and size, if it offers one. Where it cannot be
    opened, the status says why, and all goes through files."""
    if offered is None:
        return None
    descriptor, size = offered
    try:
        return SharedMemory(CudaDriver(), size, descriptor)
    except RuntimeError as error:  # CudaError, or one of torch
        status["unshared"] = str(error)
        return None


class Exchange:
    """The runner's side.

    Args:
        cuda: the runtime.
        stream: the stream of all copies.
        inputs: address of the file that commands read.
        outputs: the mapped file that they write, and its address.
        memory: device memory in place of both, where bytes fit into it.
    """

    def __init__(
        self,
        cuda: Cuda,
        stream: int,
        inputs: int,
        outputs: tuple[Any, int],
        memory: SharedMemory | None,
    ) -> None:
        self._cuda, self._stream, self._inputs = cuda, stream, inputs
        (self._output, self._outputs), self._memory = outputs, memory

    def receive(self, target: int, at: int, size: int, whole: int) -> None:
        """Copy bytes that the judge sent, `size` of `whole` from a place on, to an address."""
        if memory := goes_through(self._memory, whole):
            self._cuda.copy_async(target, memory.pointer + at, size, self._stream)
        else:
            self._cuda.to_device(target, self._inputs + at, size)

    def give(self, left: Arena) -> None:
        """Copy the returned bytes of all sets to where the judge reads them. In memory they lie
        over what was sent."""
        memory = goes_through(self._memory, left.returned * left.sets)
        for here, at, size in left.pieces(left.returned):
            if memory:
                self._cuda.copy_async(memory.pointer + at, here, size, self._stream)
            else:
                self._cuda.to_host(self._outputs + at, here, size)
        self._cuda.synchronize()

    def summed(self, left: Arena, mixer: Mixer, key: int) -> Any:
        """A digest of what was given, or checksums where it was given in a file."""
        size = left.returned * left.sets
        if memory := goes_through(self._memory, size):
            return mixer.digest(memory.bytes[:size], key)
        return checksums(memoryview(self._output)[:size])
