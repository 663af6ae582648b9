"""Ceilings that hold: before each call and each judgement its worst case is reserved in the
journal, afterwards what it took is noted there."""

from __future__ import annotations

import math

from patcher.bench import BudgetError
from patcher.models.ceilings import (
    RESERVED,
    SPENT,
    UNKNOWN,
    WAITING,
    Account,
    Amount,
    Resource,
    SpendingLimits,
    account,
    dollars,
)
from patcher.runs.run import Run

SHORTEST_S = 30.0
"""With less time left than this, nothing is begun."""


class Budget:
    """The accounts of one run: what was spent, what is reserved, and what is left below the
    ceilings on money, tokens and time. Its state is the run's journal and nothing else.

    Args:
        run: whose journal has the notes.
        ceilings: None: those of the run's settings, and what it was given later.
    """

    def __init__(self, run: Run, ceilings: SpendingLimits | None = None) -> None:
        self.run = run
        self.ceilings = ceilings or SpendingLimits.of_run(run.config.settings, run.events)

    @property
    def account(self) -> Account:
        return account(self.run.events)

    def reserved(self, step: str) -> Amount | None:
        """The worst case that is reserved for a step whose end is not known."""
        return self.account.reserved.get(step)

    def time_limit(self, what: str, longest_s: float, clocks: tuple[Resource, ...]) -> float | None:
        """Seconds that may be used now; None where there is no ceiling on time.

        Args:
            what: what is to be begun, for the error's message.
            longest_s: the most that it is ever given.
            clocks: the times that it takes: `wall_s`, `gpu_s`.

        Raises:
            BudgetError: less than `SHORTEST_S` is left.
        """
        used = self.account.committed
        limit: float | None = None
        for name in clocks:
            ceiling = self.ceilings.of(name)
            if ceiling is not None:
                left = ceiling - getattr(used, name)
                if left < SHORTEST_S:
                    raise self._crossed(name, what, SHORTEST_S)
                limit = min(left, longest_s if limit is None else limit)
        return limit

    def reserve(self, step: str, worst: Amount, **more: str) -> None:
        """Note the worst case of what is about to begin; what `waits` has it already.

        Args:
            more: what else is to be noted.

        Raises:
            BudgetError: it could cross the ceiling on money or tokens.
        """
        account = self.account
        if step in account.waiting:
            return
        used = account.committed
        # Time is what `time_limit` found to be left: adding it up again may round over a ceiling.
        for name in ("usd", "tokens"):
            needed, ceiling = getattr(worst, name), self.ceilings.of(name)
            if needed and ceiling is not None and getattr(used, name) + needed > ceiling:
                raise self._crossed(name, "the next call", needed)
        if worst != Amount():
            self.run.note(step, **worst.noted(RESERVED), **more)

    def spend(
        self, step: str, spent: Amount, unknown: Amount | None = None, **more: str | int
    ) -> None:
        """Note what a step took, in place of what was reserved for it.

        Args:
            unknown: the part of it of which nobody knows whether it was used.
            more: what else is to be noted, e.g. of `CallCounts`.
        """
        part = {} if unknown is None else unknown.noted(UNKNOWN)
        self.run.note(step, **spent.noted(SPENT), **part, **more)

    def waits(self, step: str) -> None:
        """Note that the answer comes later, from outside: what is reserved stays so."""
        if self.reserved(step) is not None:
            self.run.note(step, **{WAITING: True})

    def spend_time(self, step: str, what: str, seconds: float) -> None:
        """Note time that is about to pass.

        Raises:
            BudgetError: it would cross the ceiling on time.
        """
        ceiling, used = self.ceilings.of("wall_s"), self.account.committed.wall_s
        if ceiling is not None and used + seconds > ceiling:
            raise self._crossed("wall_s", what, seconds)
        self.spend(step, Amount(wall_s=seconds))

    def _crossed(self, name: Resource, what: str, more: float) -> BudgetError:
        used, ceiling = getattr(self.account.committed, name), self.ceilings.of(name) or 0.0
        flag, unit = _FLAGS[name]
        enough = (used + 2 * more) / unit
        return BudgetError(
            f"{what} could use {_said(name, more)}; "
            f"{_said(name, used)} of the budget of {_said(name, ceiling)} are used",
            f"raise it: patcher resume --budget-{flag} {math.ceil(100 * enough) / 100:g}",
        )


_FLAGS: dict[Resource, tuple[str, float]] = {
    "usd": ("usd", 1.0),
    "tokens": ("tokens", 1.0),
    "wall_s": ("minutes", 60.0),
    "gpu_s": ("gpu-minutes", 60.0),
}


def _said(name: Resource, value: float) -> str:
    match name:
        case "usd":
            return dollars(value)
        case "tokens":
            return f"{value:,.0f} tokens"
        case "wall_s":
            return f"{_minutes(value)} minutes"
        case "gpu_s":
            return f"{_minutes(value)} GPU minutes"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds >= 6 or not seconds else f"{seconds / 60:.1g}"


def time_is_up(what: str, limit_s: float | None) -> BudgetError:
    """The error of a call or a judgement that was stopped at its limit."""
    return BudgetError(
        f"{what} was stopped after {limit_s:.0f} s, the time that there was for it",
        "raise it: patcher resume --budget-minutes M (or --budget-gpu-minutes M)",
    )
