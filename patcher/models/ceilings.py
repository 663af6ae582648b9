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
UNKNOWN = "unknown"
"""Notes in the journal under the step that uses something: `reserved_usd`, `spent_usd`,
`spent_wall_s`, ... The one on money is always there. `unknown_usd` and `unknown_tokens` are the
part of what is booked as spent of which nobody knows whether it was."""
WAITING = "waiting"
"""The note on a call whose answer comes later, from outside."""
RAISED = "ceilings"
"""The subject of the note by which `patcher resume` gives a run more."""


def dollars(value: float) -> str:
    """An amount of money, however small: what is there is not shown as nothing."""
    if value and value < 0.01:
        return f"${value:.2g}" if value >= 1e-4 else "under $0.0001"
    return f"${value:,.2f}"


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

    def less(self, other: Amount) -> Amount:
        """What is left of it; never below nothing."""
        return Amount.model_validate(
            {name: max(0, getattr(self, name) - getattr(other, name)) for name in RESOURCES}
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


class CallCounts(Record):
    """What a provider says of one call, as noted beside what it took."""

    model: str = ""
    price: str = ""
    """Where its price is from."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the input."""


class Account(Record):
    """What was used, by the journal."""

    used: Amount = Amount()
    """What replies and judgements took, as far as it is known."""
    unknown: Amount = Amount()
    """The worst case of calls that failed and may have been billed, and of replies without counts
    that can be true."""
    reserved: dict[str, Amount] = Field(default_factory=dict)
    """The worst case of what has no known end, by step; after a kill it stays counted."""
    calls: tuple[CallCounts, ...] = ()
    waiting: frozenset[str] = frozenset()
    """Of the reserved steps those whose answers come later, from outside."""

    @property
    def set_aside(self) -> Amount:
        return sum(self.reserved.values(), Amount())

    @property
    def spent(self) -> Amount:
        """What the ceilings count as gone."""
        return self.used + self.unknown

    @property
    def committed(self) -> Amount:
        return self.spent + self.set_aside

    @property
    def spent_usd(self) -> float:
        return self.spent.usd

    @property
    def committed_usd(self) -> float:
        return self.committed.usd

    @property
    def ledger(self) -> CostLedger:
        def total(name: str) -> int:
            return sum(getattr(call, name) for call in self.calls)

        def names(name: str) -> tuple[str, ...]:
            return tuple(
                dict.fromkeys(said for call in self.calls if (said := getattr(call, name)))
            )

        return CostLedger(
            used=self.used,
            set_aside=self.set_aside,
            unknown=self.unknown,
            calls=len(self.calls),
            input_tokens=total("input_tokens"),
            output_tokens=total("output_tokens"),
            cached_tokens=total("cached_tokens"),
            models=names("model"),
            price_sources=names("price"),
        )


class CostLedger(Record):
    """What a run cost, in three columns: their sum is the most that it can have cost."""

    used: Amount = Amount()
    """As the providers count it."""
    set_aside: Amount = Amount()
    """The worst case of calls under way, or killed before their end."""
    unknown: Amount = Amount()
    """The worst case of calls that failed and may have been billed, or came without counts."""
    calls: int = 0
    """Replies that came."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the input."""
    models: tuple[str, ...] = ()
    """Those that answered."""
    price_sources: tuple[str, ...] = ()

    @property
    def most_usd(self) -> float:
        return self.used.usd + self.set_aside.usd + self.unknown.usd

    def columns(self) -> dict[str, Amount]:
        """By the name that people read."""
        return {"used": self.used, "set aside": self.set_aside, "unknown": self.unknown}

    def details(self) -> str:
        """What lies behind the figures, in a sentence."""
        replies = "1 reply" if self.calls == 1 else f"{self.calls:,} replies"
        said = (
            f"{replies}: {self.input_tokens:,} tokens in "
            f"({self.cached_tokens:,} of them cached), {self.output_tokens:,} out"
        )
        if self.models:
            said += f"; answered by {', '.join(self.models)}"
        if self.price_sources:
            said += f"; prices by {', '.join(self.price_sources)}"
        return f"{said}."

    def sentence(self) -> str:
        """Money, or else tokens, in words; empty where nothing was asked."""
        columns = self.columns()
        if any(each.usd for each in columns.values()):
            return ", ".join(
                f"{dollars(each.usd)} {name}"
                for name, each in columns.items()
                if each.usd or name == "used"
            )
        return ", ".join(
            f"{each.tokens:,} tokens {name}" for name, each in columns.items() if each.tokens
        )


def account(events: Iterable[Event]) -> Account:
    """The fold of a journal's notes on what was used."""
    used, unknown = Amount(), Amount()
    reserved: dict[str, Amount] = {}
    calls: list[CallCounts] = []
    waiting: set[str] = set()
    for event in events:
        if event.kind != "note":
            continue
        data = event.data
        if WAITING in data:
            waiting.add(event.step)
        elif f"{RESERVED}_usd" in data:
            # that one was killed before its end, which nobody will ever know
            unknown += reserved.pop(event.step, Amount())
            reserved[event.step] = Amount.of_note(RESERVED, data)
        elif f"{SPENT}_usd" in data:
            reserved.pop(event.step, None)
            waiting.discard(event.step)
            spent, part = Amount.of_note(SPENT, data), Amount.of_note(UNKNOWN, data)
            if "trouble" in data and f"{UNKNOWN}_usd" not in data:  # as earlier versions noted it
                part = Amount(usd=spent.usd, tokens=spent.tokens)
            unknown += part
            used += spent.less(part)
            if "input_tokens" in data or "model" in data:
                known = {name: data[name] for name in CallCounts.model_fields if name in data}
                calls.append(CallCounts.model_validate(known))
    return Account(
        used=used,
        unknown=unknown,
        reserved=reserved,
        calls=tuple(calls),
        waiting=frozenset(waiting),
    )
