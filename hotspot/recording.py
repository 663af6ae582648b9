"""What a source gave, before anything is made of it: rows of a summary, or launches with times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.profile import Gpu, ProfileWarning
from patcher.hotspot.timeline import Codes, Integers, by_start


class SummaryRow(NamedTuple):
    """One kernel of a summary that has no times of single launches."""

    name: str
    instances: int
    total_ns: int
    median_ns: float | None = None
    """None where the source does not say; likewise below."""
    min_ns: int | None = None
    max_ns: int | None = None


@dataclass(frozen=True)
class Launches:
    """Kernel launches in columns of equal length, in order of start."""

    texts: tuple[str, ...]
    """Kernel names, as the source spells them; each once."""
    name: Codes
    """Index into `texts`."""
    start: Integers
    """Nanoseconds on the GPU's clock, from any origin."""
    end: Integers
    device: Codes
    stream: Codes
    call: Integers | None = None
    """Launches of one call of a module share a number and count as one instance; -1: by itself.
    None: all by themselves."""

    def __len__(self) -> int:
        return len(self.start)

    def chosen(self, mask: NDArray[np.bool_] | Integers | slice) -> Launches:
        """Those launches alone, by mask or in this order; `texts` stays whole."""
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
        """By start."""
        order = by_start(self.start)
        return self if isinstance(order, slice) else self.chosen(order)


@dataclass(frozen=True)
class Recording:
    """One source, read. Either `launches` or `rows` is there."""

    source: str
    """Kind and file name, no folder: it is printed and kept."""
    rows: tuple[SummaryRow, ...] = ()
    launches: Launches | None = None
    memory: Integers | None = None
    """Shape (n, 3): device, start and end (ns) of copies and fills; None: not recorded."""
    steps: Integers | None = None
    """Shape (n, 2): GPU time of decode steps that the source names, ns, in order."""
    gpu: Gpu | None = None
    hidden: str | None = None
    """Why the ranking of this source would mislead, if it would: kernels that it does not show."""
    warnings: tuple[ProfileWarning, ...] = ()
