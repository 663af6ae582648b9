"""The unranked contents of a source: rows of a summary, or launches with times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.marks import Phase
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
    step: Integers | None = None
    """Index of the named step that started each launch; -1 if none did."""

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
            step=None if self.step is None else self.step[mask],
        )

    def in_order(self) -> Launches:
        """The launches in order of start."""
        order = by_start(self.start)
        return self if isinstance(order, slice) else self.chosen(order)


@dataclass(frozen=True)
class NamedSteps:
    """Steps that the source names, by device and in order of start."""

    device: Codes
    """Shape (n,): the device that ran the step; a step of two devices occurs for each."""
    bounds: Integers
    """Shape (n, 2): start of its first kernel and end of its last, in ns."""
    phase: tuple[Phase | None, ...]

    def __len__(self) -> int:
        return len(self.bounds)

    def on(self, device: int) -> NamedSteps:
        """The steps of one device, in order of start."""
        mine = np.flatnonzero(self.device == device)
        phase: tuple[Phase | None, ...] = tuple(self.phase[index] for index in mine.tolist())
        return NamedSteps(self.device[mine], self.bounds[mine], phase)


@dataclass(frozen=True)
class Recording:
    """The contents of one source: either `launches` or `rows`."""

    source: str
    """Kind and file name, without the folder, since profiles store it."""
    rows: tuple[SummaryRow, ...] = ()
    launches: Launches | None = None
    memory: Integers | None = None
    """Shape (n, 3): device, start and end (ns) of copies and fills; None if not recorded."""
    steps: NamedSteps | None = None
    gpu: Gpu | None = None
    """The GPU with the most kernels, as far as the source describes it."""
    gpus: Mapping[int, Gpu] = field(default_factory=dict)
    """The GPUs by the device number of the launches."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """What the source calls devices whose numbers were changed, such as `rank 1, device 0`."""
    hidden: str | None = None
    """Why the source does not show all kernels; None if it does."""
    warnings: tuple[ProfileWarning, ...] = ()
