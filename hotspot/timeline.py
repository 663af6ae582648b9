"""Intervals on the GPU's clock: how long was the GPU busy, and with which launch?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = NDArray[np.int32]
_LONG_AGO = np.iinfo(np.int64).min


def busy_time(starts: Integers, ends: Integers) -> int:
    """Length of the union of the intervals, in the unit of the arguments."""
    order = by_start(starts)
    return int(exposed(starts[order], ends[order]).sum())


def by_start(starts: Integers) -> Integers | slice:
    """The index that sorts launches by start; a full slice if they are sorted already."""
    if bool((starts[1:] >= starts[:-1]).all()):
        return slice(None)
    order: Integers = np.argsort(starts, kind="stable")
    return order


def exposed(starts: Integers, ends: Integers) -> Integers:
    """The part of each interval that no earlier interval covers; the parts add up to the union.

    The intervals are in order of start. With programmatic dependent launch, a kernel that starts
    early and waits is charged only for the time after its predecessor. A kernel that runs beside a
    longer one is charged nothing, since a faster one would gain nothing.
    """
    own: Integers = np.maximum(ends - np.maximum(starts, _reached(ends)), 0)
    return own


def gaps(starts: Integers, ends: Integers) -> Integers:
    """Idle time before each interval, 0 for the first; the intervals are in order of start."""
    idle: Integers = np.maximum(starts - _reached(ends), 0)
    idle[:1] = 0
    return idle


def by_device(devices: Codes) -> list[Integers | slice]:
    """An index for each device that selects its launches."""
    if not len(devices) or bool((devices == devices[0]).all()):
        return [slice(None)]
    return [np.flatnonzero(devices == device) for device in np.unique(devices)]


def _reached(ends: Integers) -> Integers:
    """For each interval: the latest end of all earlier ones."""
    reached = np.empty_like(ends)
    reached[:1] = _LONG_AGO // 2
    np.maximum.accumulate(ends[:-1], out=reached[1:])
    return reached
