"""Verdicts as steps of the run: a source is judged once, and a round's candidates are all handed
over before the loop waits for any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench import Candidate, Evaluation, VerificationError
from patcher.agent.waiting import Waiting
from patcher.run import Run

Judge = Callable[[Candidate], Evaluation]
"""Says what one candidate is worth. A judge elsewhere takes the candidate and raises
`WaitingError` until its verdict has come."""
Prepare = Callable[[Sequence[Candidate]], None]
"""Told of a round's new candidates before the first is judged: to build them side by side."""


class Judging:
    """The judge behind the loop on one op."""

    def __init__(self, run: Run, op_name: str, judge: Judge, prepare: Prepare | None) -> None:
        self._run = run
        self._op_name = op_name
        self._judge = judge
        self._prepare = prepare
        self._judged: dict[str, tuple[int, Evaluation]] = {}

    def __call__(self, candidates: Mapping[int, Candidate]) -> dict[int, tuple[int, Evaluation]]:
        """For each iteration the verdict, and the iteration that it was given in: an earlier one,
        where the source is the same.

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
        waiting = Waiting()
        for digest, (iteration, candidate) in new.items():
            with waiting.begun():
                self._judged[digest] = iteration, self._verdict(iteration, candidate)
        waiting.settle()
        return {at: self._judged[candidate.digest] for at, candidate in candidates.items()}

    def _step(self, iteration: int) -> str:
        return f"{self._op_name}/{iteration}/evaluate"

    def _verdict(self, iteration: int, candidate: Candidate) -> Evaluation:
        found = self._run.step(self._step(iteration), lambda: self._judge(candidate), Evaluation)
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
