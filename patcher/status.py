"""Where a run stands, also while another process works on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field, ValidationError

from patcher.agent import recorded_stop
from patcher.attempts import Attempt
from patcher.bench import SCHEMA_VERSION, Outcome, Record
from patcher.models.batch_questions import waiting_batches
from patcher.models.ceilings import CostLedger, account
from patcher.runs.journal import Event, State, fold
from patcher.runs.run import Run

_ENDS = re.compile(r"\w+/stopped(-\d+)?")
"""Steps in which the loop on an op ended."""


class Status(Record):
    """One look at a run; the next one may say otherwise."""

    schema_version: int = SCHEMA_VERSION
    run: str
    state: Literal["running", "stopped", "finished"]
    step: str | None
    """The one under way, or the one that it stopped in."""
    last: str | None
    """When its journal was last written, ISO 8601, UTC."""
    candidates: int
    best_iteration: int | None
    best_speedup: float | None
    """Geometric mean over the strongest baseline, of the one that the loop keeps: the fastest, or
    the first by the user's own score."""
    spent_usd: float
    """The most that it can have cost: the sum of the ledger's columns."""
    ledger: CostLedger = Field(default_factory=CostLedger)
    batches: tuple[str, ...] = ()
    """Sent, and not answered yet."""

    def sentence(self) -> str:
        """For people."""
        where = f" in its step {self.step}" if self.step else ""
        said = f"run {self.run} "
        match self.state:
            case "running":
                said += f"is running{where}"
            case "stopped":
                said += f"stopped{where}; go on with: patcher resume {self.run}"
            case "finished":
                said += "is finished"
        best = f", best {self.best_speedup:.3f}x" if self.best_speedup else ""
        if self.batches:
            said += f"; waiting for {', '.join(self.batches)}"
        money = self.ledger.sentence()
        spent = f"; {money}" if money else ""
        return f"{said} ({self.candidates} candidates{best}{spent})"


def status(run: Run) -> Status:
    """Where the run stands; takes no lock.

    Raises:
        VerificationError: its journal was changed.
    """
    running = run.written  # before the journal: one that has ended by now is told to be running
    events = run.events  # read once: it may grow meanwhile
    state = fold(events)
    found = attempts(run)
    best = best_of(found)
    pending = _open_step(run, events, state)
    ended = "decision" in state.results or _loop_ended(run, state, best)
    ledger = account(events).ledger
    return Status(
        run=run.id,
        state="running" if running else "finished" if ended and not pending else "stopped",
        step=pending,
        last=events[-1].time if events else None,
        candidates=len(found),
        best_iteration=best.iteration if best else None,
        best_speedup=best.geomean_speedup if best else None,
        spent_usd=ledger.most_usd,
        ledger=ledger,
        batches=waiting_batches(events),
    )


def _open_step(run: Run, events: Sequence[Event], state: State) -> str | None:
    """The last step without a result. One that a ceiling kept from it is none once the loop has
    ended for that, until the run is given more."""
    ends = {step for step in state.results if _ENDS.fullmatch(step)}
    ends = {step for step in ends if recorded_stop(run, step.rsplit("/", 1)[0])}
    ended = max((each.seq for each in events if each.step in ends), default=-1)
    begun = {each.step: each.seq for each in events if each.kind == "intent"}
    return next((step for step in reversed(state.pending) if begun[step] > ended), None)


def attempts(run: Run) -> tuple[Attempt, ...]:
    """Those done so far, in order; one whose file is not there yet is left out."""
    found = []
    for file in run.path.glob("ops/*/*/attempt.json"):
        try:
            found.append(Attempt.model_validate_json(file.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValidationError):
            continue  # taken away just now, or of another version
    return tuple(sorted(found, key=lambda attempt: attempt.iteration))


def best_of(found: Iterable[Attempt]) -> Attempt | None:
    """The one that the loop keeps: of those that are right and faster than the baseline."""
    right = [one for one in found if one.outcome is Outcome.CORRECT and one.duplicate_of is None]
    return max(right, key=lambda attempt: attempt.worth, default=None)


def _loop_ended(run: Run, state: State, best: Attempt | None) -> bool:
    """Whether nothing comes after the loop: it was all that was asked for, or found nothing."""
    ops = {step.rsplit("/", 1)[0] for step in state.results if _ENDS.fullmatch(step)}
    over = any(recorded_stop(run, name) for name in ops)
    whole = run.config.settings.get("plan", {}).get("whole", True)
    return over and (best is None or not whole)
