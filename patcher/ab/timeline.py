"""The time of a measurement by phase."""

from __future__ import annotations

import time
from collections.abc import Callable

from patcher.bench.ab.phases import ABPhase


class Timeline:
    """A `patcher.bench.ab.phases.ABProgress` that forwards progress and adds up the time of each
    phase, which lasts until the next call.
    """

    def __init__(
        self,
        report: Callable[[str, int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start in the first phase.

        Args:
            report: called with the current step in words, the amount done, and the total.
            clock: returns seconds.
        """
        self._report, self._clock = report, clock
        self._spent: dict[ABPhase, float] = {}
        self._phase, self._since = ABPhase.READY, clock()

    def __call__(self, phase: ABPhase, said: str, done: int, total: int) -> None:
        self._turn(phase)
        self._report(said, done, total)

    def took_s(self) -> dict[str, float]:
        """Seconds by phase, the longest first."""
        self._turn(self._phase)
        spent = sorted(self._spent.items(), key=lambda one: -one[1])
        return {phase.value: round(seconds, 1) for phase, seconds in spent}

    def _turn(self, phase: ABPhase) -> None:
        now = self._clock()
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
