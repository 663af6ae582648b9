"""Strategies without feedback: one shot, and repeated sampling."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts.history import CandidateRequest, IterationResult


class Single:
    """One question, one candidate."""

    name = "single"

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        return () if tried else (CandidateRequest(kind="generate"),)


class IndependentSamples:
    """The same question again and again, `width` at a time, each answer independent."""

    name = "sample"

    def __init__(self, width: int) -> None:
        self.width = width

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        draws = range(len(tried), len(tried) + min(self.width, left))
        return tuple(CandidateRequest(kind="generate", draw=draw) for draw in draws)
