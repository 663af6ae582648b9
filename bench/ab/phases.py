"""Phases of an A/B, for progress reports."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class ABPhase(StrEnum):
    """A phase of an A/B; its value is shown to people."""

    READY = "getting ready"
    """Before the first report."""
    LOAD = "loading engines"
    TUNE = "looking for the best stock configuration"
    PAIRS = "pairs"
    OTHER = "other traffic"
    ASK = "tokens, logits, memory"
    QUALITY = "quality"


ABProgress = Callable[[ABPhase, str, int, int], None]
"""Called with the phase, the current step in words, the amount done, and the total."""


def silent(phase: ABPhase, said: str, done: int, total: int) -> None:
    """An `ABProgress` that reports nothing."""
