"""Times of a trace's events, exact to the nanosecond, without the events that have none."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np

from patcher.hotspot.readers.events import Event
from patcher.hotspot.timeline import Integers, by_start

_LARGEST = 1 << 61
"""Limit of a time in ns (73 years); a sum of two fits 64 bits."""
_LONGEST = 1 << 58
"""Limit in ns (9 years) of all durations together and of the trace; sums over devices fit 64
bits."""
_DAY = 86_400 * 10**9
_HOUR = 3_600 * 10**9


class DamagedError(Exception):
    """The trace's GPU work is malformed; the message says how."""


class MergedError(Exception):
    """The trace holds several ranks that cannot be told apart; the message says by what."""


@dataclass(frozen=True)
class TimedEvents:
    """Events with usable times, in the order of the file."""

    events: list[Event]
    start: Integers
    """Shape (n,), ns, like `end`."""
    end: Integers
    lost: int
    """Events without a usable time, which are left out."""

    @property
    def order(self) -> Integers | slice:
        """The index that sorts them by start."""
        return by_start(self.start)


def timed_events(events: list[Event]) -> TimedEvents:
    """Read the times of kernels or copies.

    An event without a time is left out, as is one at time 0 or before in a trace hours away from 0,
    and one of days among shorter ones: profilers write such where they could not measure.

    Raises:
        DamagedError: the rest spans years.
    """
    read = [(event, times) for event in events if (times := interval(event)) is not None]
    table = np.array([times for _, times in read], dtype=np.int64).reshape(-1, 2)
    keep = np.ones(len(read), dtype=bool)
    if len(read):
        start, spent = table[:, 0], table[:, 1] - table[:, 0]
        keep = ~((start == 0) & (spent == 0) | (start <= 0) & (np.median(start) > _HOUR))
        endless = spent > _DAY
        if 2 * int(endless.sum()) < len(read):
            keep &= ~endless
        table = table[keep]
    if len(table):
        span = int(table[:, 1].max()) - int(table[:, 0].min())
        if float((table[:, 1] - table[:, 0]).sum(dtype=float)) > _LONGEST or span > _LONGEST:
            raise DamagedError("its kernels or copies take years")
    kept = [event for (event, _), kept in zip(read, keep.tolist(), strict=True) if kept]
    return TimedEvents(kept, table[:, 0], table[:, 1], len(events) - len(kept))


def interval(event: Event) -> tuple[int, int] | None:
    """Start and end in ns; None if they are missing, not finite, or the end comes first."""
    start, length = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
    if start is None or length is None or length < 0:
        return None
    return start, start + length


def nanoseconds(value: object) -> int | None:
    """Microseconds as the trace writes them (integer or text) in whole ns; None if unusable."""
    if isinstance(value, int) and not isinstance(value, bool):
        result = value * 1000
    elif isinstance(value, str) and len(value) < 64:
        try:
            number = Decimal(value)
        except InvalidOperation:
            return None
        # check the size before converting to an integer: 1e999999999 is short as text
        if not number.is_finite() or number.adjusted() > 18:
            return None
        result = int((number * 1000).to_integral_value())
    else:
        return None
    return result if abs(result) <= _LARGEST else None
