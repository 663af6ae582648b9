"""When a failed call is tried again, and after how long: one policy for every provider.

The SDKs' own retries are off. Quota, authentication and refused requests are no `ModelError` and
stop at once.
"""

from __future__ import annotations

import email.utils
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType

from patcher.models import ModelError, Trouble

TRIES: dict[Trouble, tuple[int, float]] = {
    "rate_limit": (6, 4.0),
    "overloaded": (6, 4.0),
    "server": (4, 2.0),
    "network": (4, 1.0),
    "timeout": (2, 1.0),
    "broken": (3, 1.0),
    "refused": (3, 1.0),
    "expired": (3, 1.0),
}
"""By kind of failure: how often one question is asked at most, and the first pause in seconds.
What may have been billed is asked less often."""
SHORTEST_PAUSE_S = 1.0
"""However soon a provider says that it may be asked again."""
LONGEST_PAUSE_S = 60.0
LONGEST_WISH_S = 300.0
"""A provider that wants to be left alone for longer stops the run; it can be resumed then."""


class TimeUp(BaseException):
    """The time given to a call or a judgement is over. No `Exception`: whoever waits, in an SDK or
    in the judge, must clean up and let it pass, as with Ctrl-C."""


@contextmanager
def alarm(seconds: float | None) -> Iterator[None]:
    """Raise `TimeUp` in the block once so many seconds have passed; None is never. On the main
    thread only: it is a signal, which also ends a wait for a socket or a process."""
    if seconds is None:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also when it rang in the line above
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Clock:
    """Time and chance; a test gives its own."""

    now: Callable[[], float] = time.monotonic
    """Seconds; only differences count."""
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    """From 0 to 1: runs that failed together must not come back together."""
    alarm: Callable[[float | None], AbstractContextManager[None]] = alarm


def pause_s(error: ModelError, failed: Counter[Trouble], jitter: float) -> float | None:
    """Seconds until the next try, when `failed` counts every failure of this question so far; None:
    there is none."""
    tries, first = TRIES[error.trouble]
    if failed[error.trouble] >= tries:
        return None
    if error.retry_after_s:
        wish = max(error.retry_after_s, SHORTEST_PAUSE_S)
        return wish * (1 + jitter / 10) if wish <= LONGEST_WISH_S else None
    grown = first * 2 ** (failed[error.trouble] - 1)
    return float(min(grown, LONGEST_PAUSE_S) * (0.5 + jitter / 2))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from `retry-after-ms` or `retry-after` (a number, or a date of HTTP); None where
    neither names a time to come."""
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        if math.isfinite(seconds):
            return seconds if seconds > 0 else None
    try:
        when = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
        left = when.timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return left if left > 0 else None
