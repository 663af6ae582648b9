"""Where the time of a measurement goes, by the stages that it reports."""

from __future__ import annotations

import time
from collections.abc import Callable

from patcher.ab.job import Report

KINDS = {
    "load": "loading engines",
    "tune": "looking for the best stock configuration",
    "elsewhere": "other traffic",
    "asking": "tokens, logits, memory",
    "quality": "quality",
    "revert": "quality",
}
"""What a stage's words say of it; else it takes pairs."""
PAIRS = "pairs"
BEFORE = "getting ready"
"""Until the first word."""


class Timeline:
    """A report that passes on what it is told; until the next word time is the stage's."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._spent: dict[str, float] = {}
        self._kind, self._since = BEFORE, clock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._turn(kind_of(stage))
        self._report(stage, done, total)

    def took_s(self) -> dict[str, float]:
        """Seconds by kind, the longest first."""
        self._turn(self._kind)
        spent = sorted(self._spent.items(), key=lambda one: -one[1])
        return {kind: round(seconds, 1) for kind, seconds in spent}

    def _turn(self, kind: str) -> None:
        now = self._clock()
        self._spent[self._kind] = self._spent.get(self._kind, 0.0) + now - self._since
        self._kind, self._since = kind, now


def kind_of(stage: str) -> str:
    """Of a stage's words."""
    return next((kind for word, kind in KINDS.items() if word in stage), PAIRS)
