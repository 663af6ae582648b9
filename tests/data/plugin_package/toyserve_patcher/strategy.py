"""A strategy: independent answers, a few at a time, until one is right."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts.history import CandidateRequest, IterationResult
from patcher.bench import UsageError


class FirstRight:
    """See `patcher.strategies.Strategy`: a pure function of what was tried."""

    name = "first-right"

    def __init__(self, *, width: int | None, islands: int | None, seed: int) -> None:
        if islands is not None:
            raise UsageError("strategy first-right has no islands", "drop --islands")
        self.width = width or 1

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        if any(result.right for result in tried):
            return ()
        draws = range(len(tried), len(tried) + min(self.width, left))
        return tuple(CandidateRequest(kind="generate", draw=draw) for draw in draws)
