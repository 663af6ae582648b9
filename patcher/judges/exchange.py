"""A judge behind a folder: each candidate becomes a job, and a worker puts its result beside it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from patcher.bench import Candidate, Evaluation, UsageError, WaitingError
from patcher.bench.judge import JudgeSettings, Progress
from patcher.judges.jobs import JobFolder, WorkerMachine, read_result
from patcher.judges.remote import NOT_TOLD, RemoteJudge, verdict
from patcher.judges.seal import seal

_MOST_WORDS = 2000


class ExchangeJudge(RemoteJudge):
    """Jobs go to `jobs/`, results come from `results/`; the same question finds its job again."""

    def __init__(
        self,
        place: str | Path,
        settings: JudgeSettings,
        request_id: str,
        counters: bool = False,
        report: Progress = lambda *_: None,
    ) -> None:
        super().__init__(str(place), settings, request_id, counters, report)
        self.folder = _folder(str(place))

    def submit(self, candidate: Candidate, settings: JudgeSettings | None = None) -> JobFolder:
        """Write the job, unless it is there."""
        posted = self.job(candidate, settings)
        try:
            seal(self.folder / "jobs" / posted.name, posted.job.files(candidate))
        except OSError as error:
            raise UsageError(
                f"cannot use {self.folder}: {error.strerror}", "choose another exchange:DIR"
            ) from error
        return posted

    def gather(self, jobs: Sequence[JobFolder]) -> list[Evaluation]:
        """The verdicts, once all are there."""
        found = [self._taken(job) for job in jobs]
        missing = [job.name for job, one in zip(jobs, found, strict=True) if one is None]
        if missing:
            raise WaitingError(
                f"waiting for {len(missing)} of {len(jobs)} verdicts in {self.folder / 'results'}",
                "serve them on a machine that can: patcher worker "
                f"{shlex.quote(str(self.folder))}, then: patcher resume",
            )
        return [evaluation for evaluation in found if evaluation is not None]

    def _taken(self, posted: JobFolder) -> Evaluation | None:
        folder = self.folder / "results" / posted.name
        result = read_result(folder)
        if result is None:
            return None
        return verdict(result, posted, f"remove {folder} to have it judged again")

    @classmethod
    def resolved(cls, place: str) -> str:
        return str(_folder(place).resolve())

    @classmethod
    def hardware(cls, place: str, kind: Literal["cpu", "cuda"]) -> str:
        """What the worker that was seen last says of its hardware."""
        seen: list[tuple[str, str]] = []
        for file in (_folder(place) / "machines").glob("*.json"):
            try:
                machine = WorkerMachine.model_validate_json(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, ValidationError):
                continue  # half-copied: it is not there yet
            seen += [(machine.seen, text) for known, text in machine.words.items() if known == kind]
        if seen:
            return max(seen)[1][:_MOST_WORDS]
        what = "a CPU" if kind == "cpu" else "an NVIDIA GPU"
        return f"{what} of another machine, {NOT_TOLD}"


def _folder(place: str) -> Path:
    if not place:
        raise UsageError("--judge exchange names no folder", "say exchange:DIR")
    return Path(place)
