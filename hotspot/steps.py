"""Find steady decode steps: the repeating part, without warm-up, loading and graph capture.

A decode step is a fixed sequence of kernels, so some kernel runs once per step. Cutting the
sequence there yields similar pieces. A kernel that runs once per layer yields similar pieces too,
but at regular intervals one differs, since it holds the kernels that run once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from patcher.hotspot.recording import Launches
from patcher.hotspot.timeline import Codes, Integers, gaps

COVERED = 0.98
"""A step's kernels must make up this share of the time between the first and the last step."""
ALIKE = 0.9
"""A steady step shares at least this fraction of its launches with the most frequent step, since
an engine sometimes runs other work beside it."""
CERTAIN = 3
"""Fewer repeats than this may be chance."""
CLEARLY = 8
"""A sequence in which a kernel runs this often holds layers; so few launches of one kernel per
layer are rare."""
KINDS = 3
"""A step has at least this many different kernels; filling memory with one kernel is no step."""
BY_LAYER = 0.2
"""Kernels that run once in each layer take at least this share of a step."""
SAMPLE = 1 << 18
"""Launches that are searched for the first kernel of a step."""
MOST_KINDS = 1000
MOST_ANCHORS = 64
MOST_COUNTS = 100
BETTER = 0.02
"""Longer steps must cover this fraction more time; otherwise the shortest step wins."""


@dataclass(frozen=True)
class Steps:
    """Steady decode steps, found on the main stream of one device."""

    bounds: Integers
    """Shape (n, 2), ns, in order: each step ends where the next piece of the sequence starts; the
    last step ends with its last kernel."""
    source: str
    """How the steps were found."""
    RANGES: ClassVar[str] = "ranges of the program"

    @classmethod
    def named(cls, intervals: Integers) -> Steps:
        """Steps that the source names; the host's time between two belongs to the first."""
        bounds = intervals.copy()
        bounds[:-1, 1] = bounds[1:, 0]
        return cls(bounds, cls.RANGES)


def find_steps(launches: Launches, layers: int | None = None) -> Steps | None:
    """The steady steps by the period of the kernel sequence; None if it has no period."""
    return find_period(launches, layers)[0]


def find_period(launches: Launches, layers: int | None = None) -> tuple[Steps | None, str | None]:
    """The steady steps by the period of the kernel sequence.

    Args:
        launches: the launches of one device, in order of start.
        layers: layers of the model, if known.

    Returns:
        The steps, or None and why a sequence that repeats is not taken for a step.
    """
    main = main_stream(launches)
    name, start, end = launches.name[main], launches.start[main], launches.end[main]
    anchor, doubt = _anchor(name, start, end, layers)
    return (None, doubt) if anchor is None else (_steps_from(name, start, end, anchor), None)


def _steps_from(name: Codes, start: Integers, end: Integers, anchor: int) -> Steps | None:
    pieces = _cut(name, _sums(name), anchor)
    if pieces is None:
        return None
    steady = np.flatnonzero(pieces.steady)
    begins = start[pieces.begin[steady]]
    ends = np.append(start, 0)[pieces.end[steady]]
    if pieces.end[steady[-1]] == len(name):
        ends[-1] = end[pieces.begin[steady[-1]] :].max()
    size = int(pieces.end[pieces.usual] - pieces.begin[pieces.usual])
    if steady[0] == 0 and pieces.begin[0] <= (1 - ALIKE) * size:
        begins[0] = start[0]  # a capture range begins with the step, just before its anchor
    return Steps(np.stack([begins, ends], axis=1), f"the sequence of {size} kernels that repeats")


def steps_of_layers(launches: Launches, layers: int) -> int | None:
    """The number of steps by kernels that run once in each layer, where too few steps repeat.

    Some kernel must run once in each step, as the output projection does.
    """
    counts = np.bincount(launches.name, minlength=1)
    spent = np.bincount(launches.name, weights=(launches.end - launches.start).astype(float))
    for steps in sorted({int(n) // layers for n in counts if n and n % layers == 0}):
        by_layer = float(spent[counts == steps * layers].sum())
        if by_layer >= BY_LAYER * float(spent.sum()) and bool((counts == steps).any()):
            return steps
    return None


def main_stream(launches: Launches) -> NDArray[np.bool_] | slice:
    """A mask that selects the stream with the most kernel time."""
    if all(not len(c) or bool((c == c[0]).all()) for c in (launches.device, launches.stream)):
        return slice(None)
    key = launches.device.astype(np.int64) << 32 | launches.stream.astype(np.int64) & 0xFFFFFFFF
    streams, which = np.unique(key, return_inverse=True)
    spent = np.bincount(which, weights=(launches.end - launches.start).astype(float))
    chosen: NDArray[np.bool_] = key == streams[int(np.argmax(spent))]
    return chosen


def _anchor(
    name: Codes, start: Integers, end: Integers, layers: int | None
) -> tuple[int | None, str | None]:
    """The first kernel of a step: of those that run once per step, the one that the GPU waits
    longest for. Without one, why a sequence that repeats is none."""
    middle = max(len(name) - SAMPLE, 0) // 2
    part = slice(middle, middle + SAMPLE)
    name, start, end = name[part], start[part], end[part]
    if len(name) < CERTAIN:
        return None, None
    doubt: str | None = None
    counts = np.bincount(name)
    idle, spent, sums = gaps(start, end), end - start, _sums(name)
    best, most = None, 0.0
    for count in np.unique(counts[counts >= CERTAIN])[::-1][:MOST_COUNTS]:
        once = np.flatnonzero(counts == count)[:MOST_ANCHORS]
        waits = [float(np.median(idle[name == code])) for code in once]
        earliest = [int(np.argmax(name == code)) for code in once]
        # the second candidate loses no launches if a short trace begins with a step
        for chosen in dict.fromkeys((once[np.argmax(waits)], once[np.argmin(earliest)])):
            pieces = _cut(name, sums, chosen)
            if pieces is not None and pieces.whole(name, spent):
                # fills and copies of weights repeat too, but decode takes more time
                if (why := pieces.doubt(name, layers)) is not None:
                    doubt = doubt or why
                    continue
                covered = pieces.steady_time(spent)
                if covered > (1 + BETTER) * most:
                    best, most = int(chosen), covered
    return best, doubt


@dataclass(frozen=True)
class _Pieces:
    """A kernel sequence, cut before each launch of one kernel."""

    begin: Integers
    end: Integers
    kind: Integers
    """Pieces that hold the same kernels equally often share a kind."""
    steady: NDArray[np.bool_]
    usual: int
    """A piece of the most frequent kind."""

    def whole(self, name: Codes, spent: Integers) -> bool:
        """Whether the pieces are whole steps: no differing piece recurs regularly, and their
        kernels cover the time."""
        for kind in np.unique(self.kind[~self.steady])[:MOST_KINDS]:
            distance = np.diff(np.flatnonzero(self.kind == kind))
            if len(distance) + 1 >= CERTAIN and (distance == np.median(distance)).mean() > 0.8:
                return False
        steady = np.flatnonzero(self.steady)
        stretch = slice(int(self.begin[steady[0]]), int(self.end[steady[-1]]))
        held = np.zeros(int(name.max()) + 1, dtype=bool)
        held[name[self.begin[self.usual] : self.end[self.usual]]] = True
        if held.sum() < KINDS:
            return False
        inside = spent[stretch]
        return bool(inside[held[name[stretch]]].sum() >= COVERED * inside.sum())

    def doubt(self, name: Codes, layers: int | None) -> str | None:
        """Why the pieces may be layers of a step; None if they are steps.

        A step of a model runs some kernel once in each layer. If the number of layers is unknown,
        a piece that repeats little inside is doubted when other kernels follow: a layer is followed
        by the output projection and the sampler, which no layer holds.
        """
        held = np.bincount(
            name[self.begin[self.usual] : self.end[self.usual]], minlength=int(name.max()) + 1
        )
        many = int(held.max())
        if many >= (layers or CLEARLY):
            return None
        repeats = f"a sequence of {int(held.sum())} kernels repeats {int(self.steady.sum())} times"
        if layers:
            return f"{repeats}, but none of them runs {layers} times in it, once in each layer"
        first = int(self.begin[np.flatnonzero(self.steady)[0]])
        if bool((held[name[first:]] == 0).any()):
            return f"{repeats}, but other kernels follow it, so it may be a layer"
        return None

    def steady_time(self, spent: Integers) -> float:
        total = np.concatenate(([0.0], np.cumsum(spent, dtype=float)))
        return float((total[self.end] - total[self.begin])[self.steady].sum())


def _sums(name: Codes) -> NDArray[np.uint64]:
    """Running sums of one random number per kernel: their differences identify what a piece
    holds.
    """
    weights = np.random.default_rng(0).integers(0, 1 << 63, int(name.max()) + 1, dtype=np.uint64)
    return np.concatenate((np.zeros(1, np.uint64), np.cumsum(weights[name], dtype=np.uint64)))


def _cut(name: Codes, sums: NDArray[np.uint64], anchor: int) -> _Pieces | None:
    begin = np.flatnonzero(name == anchor)
    if len(begin) < CERTAIN:
        return None
    end = np.append(begin[1:], len(name))
    _, first, kind, frequency = np.unique(
        sums[end] - sums[begin], return_index=True, return_inverse=True, return_counts=True
    )
    usual = int(np.argmax(frequency))
    if frequency[usual] < 2:
        return None
    size = int(end[first[usual]] - begin[first[usual]])
    expected = _counts(name, begin, end, first[usual])
    alike = np.zeros(len(first), dtype=bool)
    for candidate in np.argsort(-frequency)[:MOST_KINDS]:
        piece = int(first[candidate])
        if abs(int(end[piece] - begin[piece]) - size) <= (1 - ALIKE) * size:
            shared = np.minimum(_counts(name, begin, end, piece), expected).sum()
            alike[candidate] = shared >= ALIKE * size
    steady = alike[kind]
    if steady.sum() < CERTAIN:
        return None
    return _Pieces(begin, end, kind, steady, int(first[usual]))


def _counts(name: Codes, begin: Integers, end: Integers, piece: int) -> Integers:
    return np.bincount(name[begin[piece] : end[piece]], minlength=int(name.max()) + 1)
