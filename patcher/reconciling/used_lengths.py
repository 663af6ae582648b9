"""What served requests use of a paged KV cache, beside what a kernel was judged at.

A receipt has the width of the block table, which is room for the engine's longest sequence and
tells nothing of a step. What a request uses of it is in the workload; a verdict's requests use all
of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patcher.bench import (
    Contract,
    MissingError,
    UsageError,
    Workload,
)
from patcher.bench.engines.kv_cache import DecodeCache, cached_attention, decode_cache
from patcher.bench.engines.served_axes import ServedAxes, served_axes

Axes = Mapping[str, int]


@dataclass(frozen=True)
class UsedLengths:
    """Tells a kernel's timings apart by the lengths of requests."""

    names: ServedAxes
    workload: Workload
    window: int | None
    """Of the model's layers with a sliding window, in tokens; None: not known here."""

    def same(self, judged: Axes, served: Axes) -> bool:
        """Whether a timing's requests read as much of the cache as the served ones do in the middle
        of the output, whatever there is room for."""
        cache, names = self._cache(judged), self.names
        if self._shared(judged):
            return False
        alike = judged[names.pages] == cache.pages
        if not self._windowed(judged, served):
            return alike
        if names.window != self.window:
            return False
        first, last = self._judged(judged)
        within = max(last, cache.longest) <= names.window
        beyond = min(first, cache.shortest) >= names.window
        return beyond or (within and alike)

    def used(self, judged: Axes, served: Axes) -> str:
        """What served requests use, in words."""
        cache, room = self._cache(judged), served.get(self.names.pages)
        said = f"served ones had {cache.span}, {cache.middle:,} in the middle of the output"
        return said if room is None else f"{said}, of a table of {room:,}"

    def apart(self, judged: Axes, served: Axes) -> str:
        """What of the lengths is not the same, in words."""
        names = self.names
        if self._shared(judged):
            return f"judged with requests that share {judged[names.blocks]:,} pages"
        if self._windowed(judged, served) and names.window != self.window:
            window = "one that is not known here" if self.window is None else f"{self.window:,}"
            return f"judged with a window of {names.window:,} tokens, served with {window}"
        first, last = self._judged(judged)
        return (
            f"judged with requests of {first:,} to {last:,} tokens ({judged[names.pages]:,} pages "
            f"of {judged[names.block_size]}); {self.used(judged, served)}"
        )

    def _shared(self, judged: Axes) -> bool:
        """Whether a timing's cache is too small for requests that have pages of their own."""
        names = self.names
        return judged[names.blocks] < judged[names.batch] * judged[names.pages]

    def _windowed(self, judged: Axes, served: Axes) -> bool:
        return bool(served.get(self.names.windowed, judged.get(self.names.windowed)))

    def _judged(self, judged: Axes) -> tuple[int, int]:
        """The least and the most tokens of a timing's requests."""
        last = judged[self.names.pages] * judged[self.names.block_size]
        return last - judged[self.names.block_size] + 1, last

    def _cache(self, judged: Axes) -> DecodeCache:
        return decode_cache(self.workload, judged[self.names.block_size])


def used_lengths(contract: Contract, workload: Workload) -> UsedLengths | None:
    """For an op over a paged cache; None for any other, or if its axes are not those we know."""
    names = served_axes(contract.name)
    if names is None or not all(names.axes <= {s.axis, *s.fixed} for s in contract.sweeps):
        return None
    return UsedLengths(names, workload, _window(workload.model) if names.windowed else None)


def _window(model: str) -> int | None:
    try:
        return cached_attention(model).window or None
    except (UsageError, MissingError):  # where a verdict is read, its model need not be
        return None
