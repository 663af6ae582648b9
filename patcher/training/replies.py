"""What is kept of a judged reply: enough to train on, to count and to draw."""

from __future__ import annotations

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Outcome, Record
from patcher.training.environment import Turn
from patcher.training.shaping import TurnReward

_NOT_COMPILED = (Outcome.GENERATION_FAILURE, Outcome.COMPILATION_FAILURE)
_RIGHT = (Outcome.TOO_SLOW, Outcome.CORRECT)
SHARES = ("compiled", "right", "faster", "caught")
"""The shares that training and evaluation report, each a property of `JudgedReply`."""


class JudgedReply(Record):
    """The verdict on one reply, without its evaluations."""

    op: str
    digest: str | None
    """Of the candidate; None: the reply held no source."""
    outcome: Outcome
    reward: TurnReward
    lost: bool = False
    """Whether the judge's process died of it, again and again; it counts as wrong."""

    @property
    def compiled(self) -> bool:
        """Whether there was a source, and it compiled."""
        return self.outcome not in _NOT_COMPILED and not self.lost

    @property
    def right(self) -> bool:
        """Whether it passed every check."""
        return self.outcome in _RIGHT and not self.lost

    @property
    def faster(self) -> bool:
        """fast@1: right, and the lower end of its speedup over the first baseline exceeds 1."""
        milestone = self.reward.milestone
        if not self.right or milestone is None or not milestone.speedups:
            return False
        return next(iter(milestone.speedups.values())).geomean_low > 1

    @property
    def caught(self) -> bool:
        """Whether the judge caught it breaking a rule."""
        return self.outcome is Outcome.GUARD_VIOLATION

    def flags(self) -> dict[str, bool]:
        """Every share of `SHARES`."""
        return {name: bool(getattr(self, name)) for name in SHARES}


class SampledReply(Record):
    """One reply with its prompt and verdict: a line of `samples.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    number: int = Field(ge=0)
    """The update that it was sampled for, or which sample of its task it is; from 1, and 0."""
    prompt: str
    reply: str
    tokens: int = Field(ge=0)
    judged: JudgedReply


def judged_reply(turn: Turn) -> JudgedReply:
    """What a turn keeps."""
    found = list(turn.evaluations.values())
    first = next((each for each in found if not each.right), found[0] if found else None)
    return JudgedReply(
        op=turn.op,
        digest=None if first is None else first.digest,
        outcome=Outcome.GENERATION_FAILURE if first is None else first.outcome,
        reward=turn.reward,
    )
