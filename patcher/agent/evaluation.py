"""Verdicts as steps of the run: a source is judged once, and a round's candidates are all handed
over before the loop waits for any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from patcher.bench import BudgetError, Candidate, Evaluation, VerificationError, WaitingError
from patcher.judges import CandidateJudge
from patcher.judges.meter import JudgeMeter
from patcher.runs.run import Run

PrepareRound = Callable[[Sequence[Candidate]], None]
"""Told of a round's new candidates before the first is judged: to build them side by side."""


class PendingWaits:
    """Effects of a round that may each have to wait for an answer from outside: all are begun
    before the loop waits for any.

    Attributes:
        errors: of those that wait, in order.
    """

    def __init__(self) -> None:
        self.errors: list[WaitingError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """An effect whose wait does not keep the next one from being begun."""
        try:
            yield
        except WaitingError as error:
            self.errors.append(error)

    def settle(self) -> None:
        """Go on only when nothing waits.

        Raises:
            WaitingError: something does; the first is named, and how many others there are.
        """
        if not self.errors:
            return
        first, others = self.errors[0], len(self.errors) - 1
        more = f" (and {others} more)" if others else ""
        raise WaitingError(first.message + more, first.hint) from first


@dataclass(frozen=True)
class RoundEvaluations:
    """The verdicts on one round."""

    by_iteration: dict[int, tuple[int, Evaluation]]
    """For each iteration the verdict, and the iteration that it was given in: an earlier one, where
    the source is the same."""
    spent: BudgetError | None
    """Why the last ones have none."""


class Evaluator:
    """The judge behind the loop on one op."""

    def __init__(
        self,
        run: Run,
        op_name: str,
        judge: CandidateJudge,
        prepare: PrepareRound | None,
        meter: JudgeMeter,
    ) -> None:
        self._run = run
        self._op_name = op_name
        self._judge = judge
        self._prepare = prepare
        self._meter = meter
        self._known: dict[str, tuple[int, Evaluation]] = {}

    def evaluate(self, candidates: Mapping[int, Candidate]) -> RoundEvaluations:
        """The verdicts on a round's candidates, by iteration.

        Raises:
            WaitingError: a verdict has not come yet; all candidates were handed over.
            VerificationError: a stored verdict is of another candidate.
        """
        new: dict[str, tuple[int, Candidate]] = {}
        for iteration, candidate in candidates.items():
            if candidate.digest not in self._known:
                new.setdefault(candidate.digest, (iteration, candidate))
        open_ = [one for at, one in new.values() if not self._run.done(self._step(at))]
        if self._prepare and len(open_) > 1:
            self._prepare(open_)
        waits, spent = PendingWaits(), None
        for digest, (iteration, candidate) in new.items():
            try:
                with waits.collect():
                    self._known[digest] = iteration, self._verdict(iteration, candidate)
            except BudgetError as error:
                spent = error
                break
        waits.settle()
        known = {at: self._known.get(one.digest) for at, one in candidates.items()}
        return RoundEvaluations({at: found for at, found in known.items() if found}, spent)

    def _step(self, iteration: int) -> str:
        return f"{self._op_name}/{iteration}/evaluate"

    def _verdict(self, iteration: int, candidate: Candidate) -> Evaluation:
        found = self._meter.judge(self._step(iteration), lambda: self._judge(candidate))
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
