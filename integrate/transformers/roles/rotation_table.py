"""The table of cosines and sines that the layers of one forward of a model share."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from patcher.integrate.transformers.swap import Forward


class SharedTable:
    """Keeps the table of one forward. A layer that is called alone may be given the same cosines
    again, with other values in them, so nothing is kept for it."""

    def __init__(self) -> None:
        self.kept: tuple[Any, torch.Tensor] | None = None
        """(cosines, table) of the forward that runs."""
        self._inside: set[int] = set()
        """Threads in a forward of the model."""

    def run(self, original: Forward, *args: Any, **more: Any) -> Any:
        """The model's own forward, whose layers share a table."""
        if torch.compiler.is_compiling():
            return original(*args, **more)
        thread = get_ident()
        self._inside.add(thread)
        try:
            return original(*args, **more)
        finally:
            self._inside.discard(thread)
            self.kept = None

    def of(
        self, cos: torch.Tensor, shape: tuple[int, int], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The table of these cosines, kept or made.

        Args:
            cos: as the layer is given them.
            shape: of the table, [tokens, size].
            make: makes it.
        """
        # compiled code deduplicates equal work itself
        shared = not torch.compiler.is_compiling() and get_ident() in self._inside
        kept = self.kept if shared else None
        if kept is not None and kept[0] is cos and kept[1].shape == shape:
            return kept[1]
        table = make()
        if shared:
            self.kept = cos, table
        return table
