"""What has been tried and where that leaves the loop: pure functions of the attempts so far."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field

from patcher.attempts import Attempt, Phase, ReplyFailure
from patcher.bench import Candidate, Evaluation, Outcome, Record

RequestKind = Literal["generate", "repair", "optimise", "combine"]
"""As recorded loops spell it. `generate` begins anew; `combine` makes one candidate of two."""


class CandidateRequest(Record):
    """One candidate to be asked for."""

    kind: RequestKind
    parents: tuple[int, ...] = ()
    """Iterations whose candidates go into the prompt: what is repaired or improved."""
    after: int | None = None
    """The iteration whose reply could not be used and which this one makes up for."""
    unlike: tuple[int, ...] = ()
    """`generate`: iterations whose designs are known; another one is wanted."""
    draw: int | None = None
    """`generate`: which of several independent answers to the same question."""
    island: int | None = None
    why: str = ""
    """Of draws: what was drawn from what."""

    @property
    def phase(self) -> Phase:
        return "optimisation" if self.kind in ("optimise", "combine") else "functional"


class RequestRound(Record):
    """What is asked together; its replies may come in any order. Stored as a step of the run."""

    recorded_as: ClassVar[str] = "Round"

    asks: tuple[CandidateRequest, ...] = Field(min_length=1)
    reading: int = 0
    """How its replies are read: `patcher.prompting.extract`. A later version reads them alike."""


@dataclass(frozen=True)
class IterationResult:
    """One iteration, done."""

    iteration: int
    round: int
    ask: CandidateRequest
    candidate: Candidate | None
    """None: the reply held none."""
    evaluation: Evaluation | None
    failure: ReplyFailure | None = None
    """Why the reply could not be used."""
    score: float | None = None
    """By the user's own measure."""

    @property
    def right(self) -> bool:
        return self.evaluation is not None and self.evaluation.right

    @property
    def rank(self) -> tuple[bool, float]:
        """Greater is better, among those that are right."""
        if self.evaluation is None:
            return False, 0.0
        worth = self.evaluation.geomean_speedup or 0.0
        if self.score is not None:
            worth = self.score
        return self.evaluation.outcome is Outcome.CORRECT, worth


@dataclass
class LoopHistory:
    """All iterations of a loop so far, as it works with them and as they are recorded."""

    results: list[IterationResult] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)


@dataclass(frozen=True)
class Standing:
    """Where the attempts so far leave the loop."""

    best: IterationResult | None = None
    broken: IterationResult | None = None
    """The last candidate, when it is not right."""
    failures: int = 0
    """Functional rounds in a row without a right candidate."""
    repairs: int = 0
    """Functional passes since the last optimization pass."""
    reverts: int = 0
    """Optimization rounds in a row that did not better the best."""


def rounds(tried: Iterable[IterationResult]) -> list[list[IterationResult]]:
    """The attempts by round, in order."""
    return [list(group) for _, group in itertools.groupby(tried, key=lambda one: one.round)]


def best_of(tried: Iterable[IterationResult]) -> IterationResult | None:
    """The first of those with the highest rank, among those that are right."""
    best: IterationResult | None = None
    for one in tried:
        if one.right and (best is None or one.rank > best.rank):
            best = one
    return best


def standing(tried: Sequence[IterationResult]) -> Standing:
    """The fold of the attempts."""
    best = broken = None
    failures = repairs = reverts = 0
    for group in rounds(tried):
        better = best_of([*([best] if best else []), *group])
        improved, best = better is not best, better
        if any(one.ask.phase == "optimisation" for one in group):
            failures = 0
            reverts = 0 if improved else reverts + 1
        else:
            failures = 0 if any(one.right for one in group) else failures + 1
            reverts = 0 if improved else reverts
        for one in group:
            if one.ask.phase == "optimisation":
                repairs, broken = 0, None
            else:
                repairs += 1
            if one.candidate is not None:  # else one that was being repaired still is
                broken = None if one.right else one
    return Standing(best, broken, failures, repairs, reverts)
