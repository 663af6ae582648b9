"""Iterative refinement: functional passes until a candidate is right, then optimization passes on
the best one (KForge, arXiv 2606.02963)."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts.history import CandidateRequest, IterationResult, standing

MAX_REPAIRS = 1
"""Functional passes spent on an optimized candidate that broke, before going back to the best
one."""


class Refine:
    """One candidate a round: repair what is broken, begin, or improve the best.

    Translation goes the same way: what it begins from is in the prompts.
    """

    def __init__(self, name: str = "refine") -> None:
        self.name = name

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        now = standing(tried)
        after = tried[-1].iteration if tried and tried[-1].failure else None
        if now.broken and (now.best is None or now.repairs < MAX_REPAIRS):
            return (CandidateRequest(kind="repair", parents=(now.broken.iteration,), after=after),)
        if now.best is None:
            return (CandidateRequest(kind="generate", after=after),)
        return (CandidateRequest(kind="optimise", parents=(now.best.iteration,), after=after),)
