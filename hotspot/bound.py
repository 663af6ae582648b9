"""What bounds a run: kernels, collectives, copies, launches, or the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from patcher.hotspot.profile import KernelStat
from patcher.hotspot.stats import Spans

Bounding = Literal["kernels", "collectives", "copies", "launches", "the host"]


class Bound(NamedTuple):
    """The largest part of the wall time."""

    by: Bounding
    pct: float
    """Its share of the wall time."""


def bound_of(spans: Spans, kernels: Sequence[KernelStat]) -> Bound | None:
    """The part of the wall time that is longest; None if there is no wall time.

    Idle time in gaps of up to `stats.LAUNCH_GAP_NS` is the launches', longer gaps are the host's.
    """
    if not spans.wall:
        return None
    moved = sum(k.exposed_ns or 0 for k in kernels if k.operation == "communication")
    idle = spans.wall - spans.busy - spans.memory
    short = min(spans.short_waits, idle)
    parts = (spans.busy - moved, moved, spans.memory, short, idle - short)
    most = max(range(len(parts)), key=lambda i: parts[i])
    names: tuple[Bounding, ...] = get_args(Bounding)
    return Bound(names[most], 100 * parts[most] / spans.wall)
