"""Verdicts as steps of the run: a source is judged once, and a round's candidates are all handed
over before the loop waits for any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from patcher.agent.waiting import Waiting
from patcher.bench import BudgetError, Candidate, Evaluation, VerificationError
from patcher.judges import CandidateJudge
from patcher.models.budget import Budget
from patcher.runs.run import Run

Prepare = Callable[[Sequence[Candidate]], None]
"""Told of a round's new candidates before the first is judged: to build them side by side."""


@dataclass(frozen=True)
class Verdicts:
    """Of one round."""

    found: dict[int, tuple[int, Evaluation]]
    """For each iteration the verdict, and the iteration that it was given in: an earlier one, where
    the source is the same."""
    spent: BudgetError | None
    """Why the last ones have none."""


class Judging:
    """The judge behind the loop on one op."""

    def __init__(
        self, run: Run, op_name: str, judge: CandidateJudge, prepare: Prepare | None, budget: Budget
    ) -> None:
        self._run = run
        self._budget = budget
        self._op_name = op_name
        self._judge = judge
        self._prepare = prepare
        self._judged: dict[str, tuple[int, Evaluation]] = {}

    def __call__(self, candidates: Mapping[int, Candidate]) -> Verdicts:
        """The verdicts on a round's candidates, by iteration.

        Raises:
            WaitingError: a verdict has not come yet; all candidates were handed over.
            VerificationError: a stored verdict is of another candidate.
        """
        new: dict[str, tuple[int, Candidate]] = {}
        for iteration, candidate in candidates.items():
            if candidate.digest not in self._judged:
                new.setdefault(candidate.digest, (iteration, candidate))
        open_ = [one for at, one in new.values() if not self._run.done(self._step(at))]
        if self._prepare and len(open_) > 1:
            self._prepare(open_)
        waiting, spent = Waiting(), None
        for digest, (iteration, candidate) in new.items():
            try:
                with waiting.begun():
                    self._judged[digest] = iteration, self._verdict(iteration, candidate)
            except BudgetError as error:
                spent = error
                break
        waiting.settle()
        judged = {at: self._judged.get(one.digest) for at, one in candidates.items()}
        return Verdicts({at: found for at, found in judged.items() if found}, spent)

    def _step(self, iteration: int) -> str:
        return f"{self._op_name}/{iteration}/evaluate"

    def _verdict(self, iteration: int, candidate: Candidate) -> Evaluation:
        found = self._budget.judge(self._step(iteration), lambda: self._judge(candidate))
        if (found.op, found.digest) != (self._op_name, candidate.digest):
            raise VerificationError(
                f"the evaluation of iteration {iteration} is of another candidate",
                "start a new run",
            )
        self._run.write(
            f"ops/{self._op_name}/{iteration}/evaluation.json",
            found.model_dump_json(indent=1) + "\n",
        )
        return found
