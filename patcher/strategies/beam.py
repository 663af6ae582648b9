"""Beam search with diversity: the best few designs are improved side by side."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts.history import CandidateRequest, IterationResult
from patcher.strategies.designs import designs, fruitless, pending_repairs

PATIENCE = 3
"""Candidates made of one design without a gain, after which others come first."""


class Beam:
    """`width` candidates a round: what broke is repaired once, then the best designs that differ in
    structure are improved, and what is left of the width goes to new designs."""

    name = "beam"

    def __init__(self, width: int) -> None:
        self.width = width

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        count = min(self.width, left)
        asks = pending_repairs(tried)[:count]
        # One that has brought nothing for long goes behind the others; it stays the best.
        known = designs(tried, 2 * self.width)
        beam = sorted(known, key=lambda one: fruitless(one, tried) >= PATIENCE)[: self.width]
        for member in beam[: count - len(asks)]:
            asks.append(CandidateRequest(kind="optimise", parents=(member.iteration,)))
        unlike = tuple(one.iteration for one in known)
        for draw in range(len(tried) + len(asks), len(tried) + count):
            asks.append(CandidateRequest(kind="generate", unlike=unlike, draw=draw))
        return tuple(asks)
