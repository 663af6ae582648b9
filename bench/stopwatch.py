"""Seconds by stage of what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Adds up the seconds of stages; each lasts until the next one begins."""

    def __init__(self, first: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start in a stage.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._stage, self._since = first, clock()

    def turn(self, stage: str) -> None:
        """Begin a stage, which may have been there before."""
        now = self._clock()
        self._spent[self._stage] = self._spent.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def taken_s(self) -> dict[str, float]:
        """Seconds until now, in the order in which stages first ended."""
        self.turn(self._stage)
        return dict(self._spent)
