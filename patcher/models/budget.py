"""A ceiling on money, checked before each call: the worst case is reserved in the journal first."""

from __future__ import annotations

from collections.abc import Iterable

from bench import BudgetError, Record, UsageError
from patcher.journal import Event
from patcher.models import Asked, Model, ModelError, Request
from patcher.run import Run

RESERVED = "reserved_usd"
RELEASED = "released_usd"
SPENT = "spent_usd"
"""Keys of the journal's notes on money, under the step that asks."""


class Account(Record):
    """Money by the journal."""

    spent_usd: float
    """What replies cost, and the worst case of calls that failed and may have been billed."""
    reserved_usd: dict[str, float]
    """The worst case of calls whose end nobody knows yet, by step; after a kill it stays
    counted."""

    @property
    def committed_usd(self) -> float:
        return self.spent_usd + sum(self.reserved_usd.values())


def account(events: Iterable[Event]) -> Account:
    """The fold of a journal's notes on money."""
    spent = 0.0
    reserved: dict[str, float] = {}
    for event in events:
        if event.kind != "note":
            continue
        if RESERVED in event.data:
            spent += reserved.pop(event.step, 0.0)
            reserved[event.step] = event.data[RESERVED]
        elif RELEASED in event.data:
            reserved.pop(event.step, None)
        elif SPENT in event.data:
            reserved.pop(event.step, None)
            spent += event.data[SPENT]
    return Account(spent_usd=spent, reserved_usd=reserved)


def ask(run: Run, model: Model, request: Request, ceiling_usd: float | None) -> Asked:
    """Ask as a step of the run: once, ever. The question and the answer are stored as they were.

    Raises:
        BudgetError: the call could cross the ceiling.
        UsageError: a ceiling is set and the model's price is unknown.
    """
    asked = run.step(
        request.step, lambda: _reserve_and_ask(run, model, request, ceiling_usd), Asked
    )
    # Settled after the reply is safe on the disk: a kill before this line leaves the reservation.
    if request.step in account(run.events).reserved_usd:
        run.note(request.step, **{SPENT: asked.reply.usage.cost_usd or 0.0})
    return asked


def _reserve_and_ask(run: Run, model: Model, request: Request, ceiling: float | None) -> Asked:
    worst = model.worst_cost_usd(request)
    if ceiling is not None:
        _check(model, worst, account(run.events).committed_usd, ceiling)
    if worst:
        run.note(request.step, **{RESERVED: worst})
    try:
        reply = model.ask(request)
    except Exception as error:
        if worst and not (isinstance(error, ModelError) and error.charged):
            run.note(request.step, **{RELEASED: worst})
        raise
    return Asked(request=request, reply=reply)


def _check(model: Model, worst: float | None, committed: float, ceiling: float) -> None:
    if worst is None:
        raise UsageError(
            f"no price is known for {model.name}, so a budget in dollars cannot hold",
            "choose a priced model, or run without --budget-usd",
        )
    if worst and committed + worst > ceiling:
        raise BudgetError(
            f"the next call could cost ${worst:.2f}; "
            f"${committed:.2f} of the budget of ${ceiling:.2f} are used",
            f"resume with a larger budget: --budget-usd {committed + 2 * worst:.2f}",
        )
