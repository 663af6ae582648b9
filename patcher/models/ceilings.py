"""What a run has used of money, tokens and time, by its journal, and the ceilings on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from patcher.bench import Record
from patcher.runs.journal import Event
from patcher.runs.run import Run

Resource = Literal["usd", "tokens", "wall_s", "gpu_s"]
RESOURCES: tuple[Resource, ...] = ("usd", "tokens", "wall_s", "gpu_s")

RESERVED = "reserved"
SPENT = "spent"
"""Notes in the journal under the step that uses something: `reserved_usd`, `spent_usd`,
`spent_wall_s`, ... The one on money is always there."""
RAISED = "ceilings"
"""The subject of the note by which `patcher resume` gives a run more."""


class Amount(Record):
    """So much of everything."""

    usd: float = 0.0
    tokens: int = 0
    """Input and output together, thinking included."""
    wall_s: float = 0.0
    """Asking, pausing between tries, and judging."""
    gpu_s: float = 0.0
    """Judging on a GPU."""

    def __add__(self, other: Amount) -> Amount:
        return Amount.model_validate(
            {name: getattr(self, name) + getattr(other, name) for name in RESOURCES}
        )

    def noted(self, kind: str) -> dict[str, float]:
        """As the journal's notes have it; times in whole milliseconds, rounded up."""
        found = {f"{kind}_{name}": getattr(self, name) for name in RESOURCES}
        for name in (f"{kind}_wall_s", f"{kind}_gpu_s"):
            found[name] = math.ceil(1000 * found[name]) / 1000
        return {name: value for name, value in found.items() if value or name == f"{kind}_usd"}

    @classmethod
    def of_note(cls, kind: str, data: Mapping[str, Any]) -> Amount:
        return cls.model_validate({name: data.get(f"{kind}_{name}", 0) for name in RESOURCES})


class SpendingLimits(Record):
    """What a run may use, all ops together; None is no ceiling."""

    usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    tokens: int | None = Field(default=None, ge=0)
    minutes: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    gpu_minutes: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def of(self, resource: Resource) -> float | None:
        """The ceiling in the unit of `Amount`."""
        match resource:
            case "usd":
                return self.usd
            case "tokens":
                return self.tokens
            case "wall_s":
                return None if self.minutes is None else 60 * self.minutes
            case "gpu_s":
                return None if self.gpu_minutes is None else 60 * self.gpu_minutes

    @classmethod
    def of_run(cls, settings: Mapping[str, Any], events: Iterable[Event]) -> SpendingLimits:
        """By the run's settings (`budget_usd`, ...) and by what it was given later."""
        given = {name: settings.get(f"budget_{name}") for name in cls.model_fields}
        for event in events:
            if event.kind == "note" and event.step == RAISED:
                given |= event.data
        return cls.model_validate(given)

    def note_in(self, run: Run) -> None:
        """Give a run new ceilings on the whole of it; what is None stays as it was."""
        if given := self.model_dump(exclude_none=True):
            run.note(RAISED, **given)


class Account(Record):
    """What was used, by the journal."""

    spent: Amount
    """What replies and judgements took, and the worst case of calls that failed and may have been
    billed."""
    reserved: dict[str, Amount]
    """The worst case of what has no known end, by step; after a kill it stays counted."""

    @property
    def committed(self) -> Amount:
        return sum(self.reserved.values(), self.spent)

    @property
    def spent_usd(self) -> float:
        return self.spent.usd

    @property
    def committed_usd(self) -> float:
        return self.committed.usd


def account(events: Iterable[Event]) -> Account:
    """The fold of a journal's notes on what was used."""
    spent = Amount()
    reserved: dict[str, Amount] = {}
    for event in events:
        if event.kind != "note":
            continue
        if f"{RESERVED}_usd" in event.data:
            spent += reserved.pop(event.step, Amount())
            reserved[event.step] = Amount.of_note(RESERVED, event.data)
        elif f"{SPENT}_usd" in event.data:
            reserved.pop(event.step, None)
            spent += Amount.of_note(SPENT, event.data)
    return Account(spent=spent, reserved=reserved)
