"""What a candidate's process needs to hand its captured calls over, and another to take them.

The buffer sets and the tensors that a candidate makes lie at addresses that another process can
have, too, and the images of all modules are collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .driver import Driver
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
        self._images, self._driver = images, Driver()
        self._memory = PlacedMemory(self._driver)
        self._pool = Pool(self._driver, self._memory)
        self._sets: tuple[int, int] | None = None
        self.pool_id = self._pool.id

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        """While a candidate runs outside of a capture: its tensors lie in placed memory."""
        with self._pool.used():
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
            over = HandOver(
                self._driver, self._images, Parcel(address, capacity), [self._sets]
            )
            document = over.write(graphs, list(self._pool.segments.items()))
        except CannotCarry as reason:
            return {"reason": str(reason)}
        return {"document": document, "sets": list(self._sets), "notes": over.notes}

    def close(self) -> None:
        """Stop collecting images."""
        self._images.close()


def taken_over(address: int, size: int, document: list[int]) -> Rebuilt:
    """Build graphs from a parcel in host memory; see `Rebuilt`."""
    return Rebuilt(Driver(), address, size, document)
