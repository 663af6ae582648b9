"""What an A/B is busy with, as it tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class ABPhase(StrEnum):
    """What the time of an A/B goes for; the value is what people read."""

    READY = "getting ready"
    """Until the first word."""
    LOAD = "loading engines"
    TUNE = "looking for the best stock configuration"
    PAIRS = "pairs"
    OTHER = "other traffic"
    ASK = "tokens, logits, memory"
    QUALITY = "quality"


ABProgress = Callable[[ABPhase, str, int, int], None]
"""Called with the phase, what is done in words, how much is done, and of how much."""


def silent(phase: ABPhase, said: str, done: int, total: int) -> None:
    """An `ABProgress` for nobody."""
