"""What a candidate's process needs to hand its captured calls over, and another to take them.

The buffer sets and the tensors that a candidate makes lie at addresses that another process can
have, too, and the images of all modules are collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .captured import Arena, Captured
from .driver import CudaDriver, CudaError
from .handover import CannotCarry, HandOver, Parcel
from .images import LoadedImages
from .placed import PlacedMemory, Pool, bytes_at
from .rebuilt import Rebuilt


class Portable:
    """The side that hands over. CUDA must have been initialised since `images` collects.

    Raises:
        CudaError: this process cannot place memory.
    """

    def __init__(self, images: LoadedImages) -> None:
        import torch

        self._images, self._driver = images, CudaDriver()
        self._memory = PlacedMemory(self._driver)
        self._sets: tuple[int, int] | None = None
        self._pool: Pool | None = None
        self._problem = images.problem
        try:
            self._pool = Pool(self._driver, self._memory)
        except (AttributeError, TypeError, RuntimeError) as error:
            # its tensors lie where the driver puts them, which another process may have free
            self._problem = f"{self._problem} PyTorch takes no memory of ours: {error}".strip()
        self.pool_id = torch.cuda.graph_pool_handle() if self._pool is None else self._pool.id

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        """While a candidate runs outside of a capture: its tensors lie in placed memory."""
        with contextlib.nullcontext() if self._pool is None else self._pool.used():
            yield

    def sets(self, size: int) -> Any:
        """Memory for the buffer sets, in place of the last one, as a tensor of bytes."""
        if self._sets is not None:
            self._memory.give_back(self._sets[0])
            self._sets = None
        address = self._memory.take(size)
        self._sets = (address, size)
        return bytes_at(address, size)

    def hand_over(self, graphs: list[int], address: int, capacity: int) -> dict[str, Any]:
        """Write graphs and what belongs to them to host memory.

        Returns:
            `document` and `sets` as [offset or address, bytes], and `notes`; or `reason` if they
            cannot be carried.
        """
        assert self._sets is not None
        try:
            over = HandOver(self._driver, self._images, Parcel(address, capacity), [self._sets])
            room = (self._memory.base, self._memory.room)
            segments = {} if self._pool is None else self._pool.segments
            document = over.write(graphs, list(segments.items()), [room])
        except CannotCarry as reason:
            return {"reason": f"{reason} {self._problem}".strip()}
        notes = [*over.notes, self._problem] if self._problem else over.notes
        return {"document": document, "sets": list(self._sets), "notes": notes}

    def close(self) -> None:
        """Stop collecting images."""
        self._images.close()


class Carrying:
    """The commands of a runner about calls that go from one process to another."""

    status: dict[str, Any]
    cuda: Any
    captured: Any
    stream: int
    inputs: int
    outputs: int
    input: Any
    output: Any
    portable: Portable | None = None
    rebuilt: Rebuilt | None = None

    def do_handover(self) -> dict[str, Any]:
        """CUDA: write the captured calls, as data, to the outputs; see `Portable.hand_over`."""
        if self.portable is None:
            return {"reason": self.status.get("not_portable", "the process was not told to")}
        return self.portable.hand_over(self.captured.children, self.outputs, len(self.output))

    def do_adopt(
        self, document: list[int], buffers: list[int], plan: dict[str, Any], sets: int
    ) -> dict[str, Any]:
        """CUDA: build graphs from the inputs, which another process handed over."""
        if self.captured is not None:
            self.captured.close()
            self.captured = None
        if self.rebuilt is not None:
            self.rebuilt.close()
            self.rebuilt = None
        self.rebuilt = Rebuilt(CudaDriver(), self.inputs, len(self.input), document)
        arena = Arena(plan, sets, memory=lambda size: bytes_at(buffers[0], size))
        snapshot = Arena(plan, sets, bare=True)
        graphs = self.rebuilt.graphs
        self.captured = Captured(self.cuda, arena, snapshot, graphs, self.stream, self.rebuilt)
        return {}

    def _make_portable(self, images: LoadedImages) -> None:
        try:
            self.portable = Portable(images)
        except CudaError as error:
            images.close()
            self.status["not_portable"] = str(error)

    def _own_memory(self) -> Any:
        return contextlib.nullcontext() if self.portable is None else self.portable.own_memory()
