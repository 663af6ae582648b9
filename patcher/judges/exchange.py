"""A judge behind a folder: each candidate becomes a job, and a worker puts its result beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from patcher.bench import (
    Candidate,
    Evaluation,
    UsageError,
    VerificationError,
    WaitingError,
    load_op,
)
from patcher.bench.judge import JudgeSettings
from patcher.judges.jobs import JobFolder, WorkerMachine, post, read_result
from patcher.judges.seal import seal

_MOST_WORDS = 2000


class ExchangeJudge:
    """Jobs go to `jobs/`, results come from `results/`; the same question finds its job again."""

    def __init__(
        self, folder: Path, settings: JudgeSettings, request_id: str, counters: bool = False
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.request_id = request_id
        self.counters = counters

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Write the jobs."""
        for candidate in candidates:
            self.submit(candidate)

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        """The verdicts, once all are there.

        Raises:
            WaitingError: some are not; every job has been written.
            VerificationError: a result is of another job or candidate, or was changed.
            PatcherError: a worker refused a job; the error is the one that it met.
        """
        return self.gather([self.submit(candidate) for candidate in candidates])

    def submit(self, candidate: Candidate, settings: JudgeSettings | None = None) -> JobFolder:
        """Write the job, unless it is there."""
        asked = settings or self.settings
        posted = post(load_op(candidate.op), candidate, asked, self.request_id, self.counters)
        try:
            seal(self.folder / "jobs" / posted.name, posted.job.files(candidate))
        except OSError as error:
            raise UsageError(
                f"cannot use {self.folder}: {error.strerror}", "choose another exchange:DIR"
            ) from error
        return posted

    def gather(self, jobs: Sequence[JobFolder]) -> list[Evaluation]:
        """See `evaluate`."""
        found = [self._taken(job) for job in jobs]
        missing = [job.name for job, one in zip(jobs, found, strict=True) if one is None]
        if missing:
            raise WaitingError(
                f"waiting for {len(missing)} of {len(jobs)} verdicts in {self.folder / 'results'}",
                f"serve them on a machine that can: patcher worker {self.folder}, "
                "then: patcher resume",
            )
        return [evaluation for evaluation in found if evaluation is not None]

    def _taken(self, posted: JobFolder) -> Evaluation | None:
        folder = self.folder / "results" / posted.name
        result = read_result(folder)
        if result is None:
            return None
        again = f"remove {folder} to have it judged again"
        if result.job != posted.digest and not (result.job is None and result.refusal):
            raise VerificationError(f"the result {posted.name} is of another job", again)
        if result.refusal is not None:
            error = result.refusal.error
            told = f"the worker refused {posted.name}: {error.message}"
            raise type(error)(told, f"{error.hint}; {again}" if error.hint else again)
        assert result.evaluation is not None
        _hold(result.evaluation, posted, again)
        return result.evaluation

    @staticmethod
    def hardware(folder: Path, kind: str) -> str:
        """What the worker that was seen last says of its hardware."""
        seen: list[tuple[str, str]] = []
        for file in (folder / "machines").glob("*.json"):
            try:
                machine = WorkerMachine.model_validate_json(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, ValidationError):
                continue  # half-copied: it is not there yet
            seen += [(machine.seen, text) for known, text in machine.words.items() if known == kind]
        if seen:
            return max(seen)[1][:_MOST_WORDS]
        what = "a CPU" if kind == "cpu" else "an NVIDIA GPU"
        return f"{what} of another machine, which has not told yet what it is"


def _hold(evaluation: Evaluation, posted: JobFolder, again: str) -> None:
    """The evaluation against what was asked.

    Raises:
        VerificationError: it is of something else.
    """
    asked = (posted.job.op, posted.job.language, posted.candidate.digest)
    if (evaluation.op, evaluation.language, evaluation.digest) != asked:
        raise VerificationError(f"the result {posted.name} is of another candidate", again)
    settings = posted.job.settings
    for what, wanted, got in (
        ("sweep", settings.sweep, evaluation.sweep),
        ("baseline", settings.baseline, evaluation.baseline),
    ):
        if evaluation.timings and wanted not in (None, "honest", got):
            raise VerificationError(f"the result {posted.name} has {what} {got}", again)
