"""The unranked contents of a source: rows of a summary, or launches with times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.profile import Gpu, ProfileWarning
from patcher.hotspot.timeline import Codes, Integers, by_start


class SummaryRow(NamedTuple):
    """One kernel of a summary, which has no times of single launches."""

    name: str
    instances: int
    total_ns: int
    median_ns: float | None = None
    """None if the source does not give it, as below."""
    min_ns: int | None = None
    max_ns: int | None = None


@dataclass(frozen=True)
class Launches:
    """Kernel launches in columns of equal length, in order of start."""

    texts: tuple[str, ...]
    """Distinct kernel names, as the source spells them."""
    name: Codes
    """Index into `texts`."""
    start: Integers
    """Nanoseconds on the GPU's clock, from any origin."""
    end: Integers
    device: Codes
    stream: Codes
    call: Integers | None = None
    """Launches of one module call share a number and count as one instance. A launch with -1
    counts by itself; with None all launches do."""

    def __len__(self) -> int:
        return len(self.start)

    def chosen(self, mask: NDArray[np.bool_] | Integers | slice) -> Launches:
        """The selected launches, by mask or in index order; `texts` stays complete."""
        return replace(
            self,
            name=self.name[mask],
            start=self.start[mask],
            end=self.end[mask],
            device=self.device[mask],
            stream=self.stream[mask],
            call=None if self.call is None else self.call[mask],
        )

    def in_order(self) -> Launches:
        """The launches in order of start."""
        order = by_start(self.start)
        return self if isinstance(order, slice) else self.chosen(order)


@dataclass(frozen=True)
class Recording:
    """The contents of one source: either `launches` or `rows`."""

    source: str
    """Kind and file name, without the folder, since profiles store it."""
    rows: tuple[SummaryRow, ...] = ()
    launches: Launches | None = None
    memory: Integers | None = None
    """Shape (n, 3): device, start and end (ns) of copies and fills; None if not recorded."""
    steps: Integers | None = None
    """Shape (n, 2): start and end (ns) of the decode steps that the source names, in order."""
    gpu: Gpu | None = None
    hidden: str | None = None
    """Why the source does not show all kernels; None if it does."""
    warnings: tuple[ProfileWarning, ...] = ()
