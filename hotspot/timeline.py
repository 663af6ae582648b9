"""Intervals on the GPU's clock: how long was it busy, and which launch was it busy with?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = NDArray[np.int32]
_LONG_AGO = np.iinfo(np.int64).min


def busy_time(starts: Integers, ends: Integers) -> int:
    """Length of the union of the intervals, in the unit of its arguments."""
    order = by_start(starts)
    return int(exposed(starts[order], ends[order]).sum())


def by_start(starts: Integers) -> Integers | slice:
    """What puts launches in order of start; nothing to do where they are, as exporters write."""
    if bool((starts[1:] >= starts[:-1]).all()):
        return slice(None)
    order: Integers = np.argsort(starts, kind="stable")
    return order


def exposed(starts: Integers, ends: Integers) -> Integers:
    """Of each interval, what none that began earlier covers; adds up to the union.

    The intervals are in order of start. A kernel that is launched early and waits for the one
    before it (programmatic dependent launch) is so charged only for what comes after that one,
    and a kernel that runs beside a longer one for nothing: making it faster would gain nothing.
    """
    own: Integers = np.maximum(ends - np.maximum(starts, _reached(ends)), 0)
    return own


def gaps(starts: Integers, ends: Integers) -> Integers:
    """Idle time before each interval; the intervals are in order of start, the first has none."""
    idle: Integers = np.maximum(starts - _reached(ends), 0)
    idle[:1] = 0
    return idle


def by_device(devices: Codes) -> list[Integers | slice]:
    """What picks each device's launches, in turn."""
    if not len(devices) or bool((devices == devices[0]).all()):
        return [slice(None)]
    return [np.flatnonzero(devices == device) for device in np.unique(devices)]


def _reached(ends: Integers) -> Integers:
    """Before each interval: how far the earlier ones reach."""
    reached = np.empty_like(ends)
    reached[:1] = _LONG_AGO // 2
    np.maximum.accumulate(ends[:-1], out=reached[1:])
    return reached
