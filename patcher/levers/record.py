"""A user's levers on what the agents read: text of their own, sources of their own, rules of their
own. All are settings; what their files held when a run began is a record of that run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from patcher.bench import Record, load_op
from patcher.bench.judge import TripwirePolicy
from patcher.models import Role


def _iterations(value: object) -> object:
    """`2`, `[0, 2]` and `"0-3, 7-"` all as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and all(type(each) is int for each in value):
        return ", ".join(map(str, value))
    return value


def _forwards(text: str) -> str:
    if any(last is not None and last < first for first, last in _spans(text)):
        raise ValueError("a span ends before it begins")
    return text


def _ops(names: object) -> object:
    for name in names if isinstance(names, list | tuple | dict) else ():
        load_op(str(name))
    return names


Iterations = Annotated[
    str,
    BeforeValidator(_iterations),
    Field(pattern=r"^\d{1,6}(-(\d{1,6})?)?(, ?\d{1,6}(-(\d{1,6})?)?)*$"),
    AfterValidator(_forwards),
]
"""From 0: `"0"`, `"0, 2-4"`, `"3-"`."""
Ops = Annotated[tuple[str, ...], BeforeValidator(_ops)]


class LeverScope(Record):
    """When a lever is pulled. What is left out means all."""

    agents: tuple[Role, ...] = ()
    iterations: Iterations | None = None
    ops: Ops = ()

    def covers(self, op: str, role: Role, iteration: int) -> bool:
        return (
            (not self.ops or op in self.ops)
            and (not self.agents or role in self.agents)
            and (
                self.iterations is None
                or any(
                    first <= iteration and (last is None or iteration <= last)
                    for first, last in _spans(self.iterations)
                )
            )
        )


class PromptLever(LeverScope):
    """One `[[prompts]]`: text for prompts, after our own or instead of it.

    Exactly one of `append`, `append_file`, `override` and `override_file`; in an override,
    `{{ prompt }}` stands for our own text.
    """

    append: str | None = Field(None, min_length=1)
    append_file: Path | None = None
    override: str | None = Field(None, min_length=1)
    override_file: Path | None = None

    @model_validator(mode="after")
    def _one(self) -> PromptLever:
        given = (self.append, self.append_file, self.override, self.override_file)
        if sum(each is not None for each in given) != 1:
            raise ValueError("give one of append, append_file, override and override_file")
        return self


class AuxiliaryLever(LeverScope):
    """One `[[auxiliary]]`: a source of the user's that the agents read."""

    file: Path
    says: str = Field("", max_length=500)
    """What it is for, in words for the agents."""


class ScoreLever(Record):
    """`[score]`: a script of the user's that says what a right candidate is worth."""

    script: Path
    timeout_s: float = Field(60.0, gt=0, le=3600)


class TripwireSettings(TripwirePolicy):
    """`[tripwires]`: what a source must not or must have; more for one op in
    `[tripwires.ops.NAME]`."""

    ops: Annotated[dict[str, TripwirePolicy], BeforeValidator(_ops)] = Field(default_factory=dict)

    def for_op(self, op: str) -> TripwirePolicy:
        more = self.ops.get(op, TripwirePolicy())
        return TripwirePolicy(
            banned=self.banned + more.banned,
            required=self.required + more.required,
            ignore=self.ignore + more.ignore,
        )


def _spans(text: str) -> list[tuple[int, int | None]]:
    """First and last iteration of each part; a last of None is no end."""
    found: list[tuple[int, int | None]] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        found.append((int(first), int(last) if last else None if dash else int(first)))
    return found
