"""What every judge on another machine has in common: jobs go out, results are held against them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Self

from patcher.bench import (
    Candidate,
    Evaluation,
    MissingError,
    Registry,
    VerificationError,
    load_op,
    sweep_named,
)
from patcher.bench.judge import JudgeSettings, Progress
from patcher.judges.jobs import JobFolder, JobResult, post

NOT_TOLD = "which has not told yet what it is"
"""The end of what is known of hardware that no worker has described."""


class UnreachableError(MissingError):
    """No judge elsewhere answers, which says nothing of a candidate or of a baseline."""


class RemoteJudge(ABC):
    """A judge that takes jobs; a context manager.

    Args:
        place: what follows the name in `--judge NAME:PLACE`; empty where nothing does.
        request_id: who asks; a job with the same id is judged once.
        counters: whether right verdicts carry hardware counters, where they can be read.
        report: called with (stage, done, total) while verdicts are waited for.

    Raises:
        UsageError: there is no such place.
    """

    def __init__(
        self,
        place: str,
        settings: JudgeSettings,
        request_id: str,
        counters: bool = False,
        report: Progress = lambda *_: None,
    ) -> None:
        self.place = place
        self.settings = settings
        self.request_id = request_id
        self.counters = counters
        self.report = report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Hand the jobs over."""
        for candidate in candidates:
            self.submit(candidate)

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        """The verdicts, in the order of the candidates.

        Raises:
            WaitingError: some are not there and will not come by themselves; all were handed over.
            VerificationError: a result is of another job or candidate, or was changed.
            PatcherError: a worker refused a job; the error is the one that it met.
        """
        return self.gather([self.submit(candidate) for candidate in candidates])

    @abstractmethod
    def submit(self, candidate: Candidate, settings: JudgeSettings | None = None) -> JobFolder:
        """Hand one job over, unless it was; with other settings than the judge's, if given."""
        ...

    @abstractmethod
    def gather(self, jobs: Sequence[JobFolder]) -> list[Evaluation]:
        """See `evaluate`."""
        ...

    @classmethod
    @abstractmethod
    def hardware(cls, place: str, kind: Literal["cpu", "cuda"]) -> str:
        """What the agents should know of the hardware that jobs are judged on."""
        ...

    @classmethod
    def usual_kind(cls, _place: str) -> Literal["cpu", "cuda"]:
        """Where a language that runs on both is judged; this machine says nothing of it."""
        return "cuda"

    @classmethod
    def resolved(cls, place: str) -> str:
        """The place as it is called from another folder."""
        return place

    def job(self, candidate: Candidate, settings: JudgeSettings | None) -> JobFolder:
        """The job of a candidate."""
        asked = settings or self.settings
        return post(load_op(candidate.op), candidate, asked, self.request_id, self.counters)


REMOTE_JUDGES: Registry[type[RemoteJudge]] = Registry("judges")


def verdict(result: JobResult, posted: JobFolder, again: str) -> Evaluation:
    """The evaluation in a result, held against what was asked.

    Args:
        again: how to have it judged again, for the hint of an error.

    Raises:
        VerificationError: it is of something else.
        PatcherError: the worker refused the job.
    """
    if result.job != posted.digest and not (result.job is None and result.refusal):
        raise VerificationError(f"the result {posted.name} is of another job", again)
    if result.refusal is not None:
        error = result.refusal.error
        told = f"the worker refused {posted.name}: {error.message}"
        raise type(error)(told, f"{error.hint}; {again}" if error.hint else again)
    assert result.evaluation is not None
    _hold(result.evaluation, posted, again)
    return result.evaluation


def _hold(evaluation: Evaluation, posted: JobFolder, again: str) -> None:
    """The evaluation against what was asked.

    Raises:
        VerificationError: it is of something else.
    """
    asked = (posted.job.op, posted.job.language, posted.candidate.digest)
    if (evaluation.op, evaluation.language, evaluation.digest) != asked:
        raise VerificationError(f"the result {posted.name} is of another candidate", again)
    settings = posted.job.settings
    # sizes may be asked for in any order, and as they are anyway
    sweep = sweep_named(load_op(posted.job.op).contract, settings.sweep)
    for what, wanted, got in (
        ("sweep", sweep and sweep.name, evaluation.sweep),
        ("baseline", settings.baseline, evaluation.baseline),
    ):
        if evaluation.timings and wanted not in (None, "honest", got):
            raise VerificationError(f"the result {posted.name} has {what} {got}", again)
