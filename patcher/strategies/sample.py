"""Strategies without feedback: one shot, and repeated sampling."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts.history import Ask, Tried


class Single:
    """One question, one candidate."""

    name = "single"

    def next(self, tried: Sequence[Tried], left: int) -> tuple[Ask, ...]:
        return () if tried else (Ask(kind="generate"),)


class IndependentSamples:
    """The same question again and again, `width` at a time, each answer independent."""

    name = "sample"

    def __init__(self, width: int) -> None:
        self.width = width

    def next(self, tried: Sequence[Tried], left: int) -> tuple[Ask, ...]:
        draws = range(len(tried), len(tried) + min(self.width, left))
        return tuple(Ask(kind="generate", draw=draw) for draw in draws)
