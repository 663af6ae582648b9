"""The time of a measurement by phase."""

from __future__ import annotations

import time
from collections.abc import Callable

from patcher.bench.ab.phases import ABPhase
from patcher.bench.judge import Stopwatch


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
        self._report = report
        self._watch = Stopwatch(ABPhase.READY.value, clock)

    def __call__(self, phase: ABPhase, said: str, done: int, total: int) -> None:
        self._watch.turn(phase.value)
        self._report(said, done, total)

    def took_s(self) -> dict[str, float]:
        """Seconds by phase, the longest first."""
        spent = sorted(self._watch.taken_s().items(), key=lambda one: -one[1])
        return {phase: round(seconds, 1) for phase, seconds in spent}
