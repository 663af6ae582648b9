"""What the agent loop says of itself: recommendations, attempts, the whole optimization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Language, Outcome, Record
from patcher.models import Usage
from patcher.models.ceilings import CostLedger

Phase = Literal["functional", "optimisation"]
"""As recorded loops spell it."""
Stage = Literal["analyse", "diagnose", "generate", "evaluate", "done"]
Stop = Literal[
    "iterations",
    "asked_all",
    "functional_failures",
    "speed_of_light",
    "reverts",
    "end_to_end_ceiling",
    "budget",
    "recording_ended",
    "compiled",
]
"""Why a loop ended; `asked_all`: its strategy had nothing more to ask;
`compiled`: of a language that nothing here runs, and a candidate compiles."""


class Stopped(Record):
    """The end of a loop: stored as a step, so that a resumed run ends the same."""

    reason: Stop
    detail: str
    """In a sentence, with the figures."""
    iterations: int = 0
    """Done by then: a round may have been cut short."""


class ReplyFailure(Record):
    """Why a reply cannot be used."""

    kind: Literal[
        "truncated",
        "repeated",
        "refused",
        "too_long",
        "no_source",
        "unclosed",
        "ambiguous",
        "empty",
        "no_json",
    ]
    detail: str


class Recommendation(Record):
    """The analyst's word: one bottleneck, one change."""

    bottleneck: str = Field(min_length=1, max_length=2000)
    change: str = Field(min_length=1, max_length=4000)
    expected_speedup: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Geometric mean speedup over the baseline after the change."""


class Diagnosis(Record):
    """The word of who judges a failure: one critical issue (CudaForge, arXiv 2511.01884)."""

    critical_issue: str = Field(min_length=1, max_length=2000)
    why_it_matters: str = Field("", max_length=2000)
    minimal_fix: str = Field(min_length=1, max_length=4000)


class Attempt(Record):
    """One iteration."""

    iteration: int
    round: int = 0
    """What was asked together has one number."""
    phase: Phase
    parents: tuple[int, ...] = ()
    """Iterations whose candidates were in the prompt, to be repaired or improved."""
    digest: str | None
    """`Candidate.digest`; None when the reply held no source."""
    outcome: Outcome
    geomean_speedup: float | None = None
    score: float | None = None
    """By the user's own measure, where there is one; it ranks in place of the speedup."""
    detail: str
    """What went wrong, or the gain, in one line."""
    usage: Usage
    """Of all replies of the iteration."""
    model: str
    """Who wrote the source, as the provider names it."""
    repairs: tuple[str, ...] = ()
    """What of the model's server was not as it should be, and how it was read instead."""
    reply_source: Literal["api", "exchange", "recorded"]
    recommendation: Recommendation | None = None
    diagnosis: Diagnosis | None = None
    """Before a repair."""
    analysis_failure: str | None = None
    """Why an optimization pass had no recommendation, or a repair no diagnosis."""
    duplicate_of: int | None = None
    """The iteration that had the same source; its verdict counts."""
    file: str | None = None
    """The source, relative to the run."""
    structure: str | None = None
    """`patcher.attempts.structure`: the same for sources that differ in text alone."""
    island: int | None = None
    why: str = ""
    """What a strategy with draws drew it from."""

    @property
    def worth(self) -> float:
        """Greater is better, among those that are right: the user's score, or else the speedup."""
        return (self.geomean_speedup or 0.0) if self.score is None else self.score


class LoopResult(Record):
    """The whole loop on one op."""

    schema_version: int = SCHEMA_VERSION
    op: str
    language: Language
    iterations: tuple[Attempt, ...]
    best_digest: str | None
    """Only a candidate that is right and faster is worth a patch; None when there is none."""
    best_iteration: int | None
    best_speedup: float | None
    best_file: str | None
    usage: Usage
    strategy: str = "refine"
    stopped: Stop
    stopped_detail: str = ""
    """In a sentence."""


class KnownKernel(Record):
    """A kernel for the same op that works: in another language or on another device, or the one to
    beat."""

    name: str
    language: Language
    summary: str = ""
    source: str


class Progress(Record):
    """Told as the loop goes."""

    op: str
    iteration: int
    iterations: int
    stage: Stage
    phase: Phase
    attempt: Attempt | None = None
    """With `done`."""
    ledger: CostLedger | None = None
    """What the run cost so far."""
