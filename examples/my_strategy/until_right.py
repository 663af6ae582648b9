"""A strategy: independent answers to one question, one at a time, until one is right."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts.history import CandidateRequest, IterationResult


class UntilRight:
    """A pure function of what was tried, so that a resumed run goes on as it would have."""

    name = "until-right"

    def __init__(self, *, width: int | None, islands: int | None, seed: int) -> None:
        """What `--width`, `--islands` and `--seed` say; this strategy needs none of them."""

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        """What to ask next, at most `left` candidates; () when nothing more is to be asked."""
        if any(result.right for result in tried):
            return ()
        return (CandidateRequest(kind="generate", draw=len(tried)),)
