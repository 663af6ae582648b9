"""What goes between a loop and a remote judge: jobs, their results, and the machines that serve.

    DIR/jobs/<op>-<digest>/        job.json, the source, manifest.json       written by the loop
    DIR/results/<op>-<digest>/     result.json, manifest.json                written by a worker
    DIR/machines/<digest>.json     what a worker judges on                   written by a worker
    DIR/claims/                    locks of the workers that share DIR       not worth copying

Nothing here is signed: who can write into DIR is believed as a judge is. The digests find what was
cut off, mixed up or edited by hand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AliasChoices, Field, ValidationError, model_validator

from patcher.bench import (
    SCHEMA_VERSION,
    Candidate,
    Environment,
    Evaluation,
    Language,
    Op,
    PatcherError,
    Record,
    Threads,
    UsageError,
    VerificationError,
    load_op,
    problem,
    relayed,
)
from patcher.bench.judge import JudgeSettings, TripwirePolicy
from patcher.judges.seal import SealedFolder, digest_of, read_sealed

MOST_JOB_BYTES = 2 << 20
MOST_RESULT_BYTES = 16 << 20
FOLDER_NAME = re.compile(r"[a-z]\w{0,79}-[0-9a-f]{16}")
"""Of a job and of its result: the op and the first half of the job's digest."""
RecordT = TypeVar("RecordT", bound=Record)


class JobSettings(Record):
    """`patcher.bench.judge.JudgeSettings`, field by field, within what a worker accepts."""

    device: Literal["cpu", "cuda"] | None
    sweep: str | None
    points: int | None = Field(ge=1)
    baseline: str | None
    pairs: int = Field(ge=2, le=1000)
    precision_pct: float = Field(gt=0, le=100)
    calls: int = Field(ge=0, le=1_000_000)
    lives_s: float = Field(ge=0, le=600)
    timeout_s: float = Field(gt=0, le=600)
    load_timeout_s: float = Field(gt=0, le=3600)
    memory_bytes: int = Field(gt=0, le=1 << 40)
    threads: Threads | None
    tripwires: bool
    policy: TripwirePolicy
    sanitize: bool
    device_code: bool = False
    recorded: None = Field(default=None, exclude=True)
    """A recording stays where it was made: a judge elsewhere has none."""

    @classmethod
    def of(cls, settings: JudgeSettings) -> JobSettings:
        fields = [field.name for field in dataclasses.fields(JudgeSettings)]
        return cls.model_validate({name: getattr(settings, name) for name in fields})

    def settings(self) -> JudgeSettings:
        return JudgeSettings(**{name: getattr(self, name) for name in type(self).model_fields})


class JudgeJob(Record):
    """`job.json`: one candidate to judge. Holds no path, no environment and no key."""

    schema_version: Literal[1] = SCHEMA_VERSION  # type: ignore[assignment]
    request_id: str = Field(
        pattern=r"^\w[\w.-]{0,99}$",
        validation_alias=AliasChoices("ticket", "request_id"),
        serialization_alias="ticket",
    )
    """Who asks: a run's id, so that no run is given another one's figures; `ticket` in the file."""
    op: str = Field(pattern=r"^[a-z]\w{0,79}$")
    op_digest: str = Field(pattern="^[0-9a-f]{64}$")
    """`bench.Op.digest`: contract, reference, inputs and baselines."""
    language: Language
    candidate_digest: str = Field(pattern="^[0-9a-f]{64}$")
    settings: JobSettings
    counters: bool = False
    """Whether the verdict should carry hardware counters, where the worker can read them."""

    def files(self, candidate: Candidate) -> dict[str, str]:
        return {"job.json": _line(self), candidate.file_name: candidate.source}


@dataclasses.dataclass(frozen=True)
class JobFolder:
    """A job as it lies in its folder."""

    job: JudgeJob
    candidate: Candidate
    digest: str
    """Of the whole folder."""

    @property
    def name(self) -> str:
        return folder_name(self.job.op, self.digest)


class WorkerMachine(Record):
    """What a worker judges on. No host name, user or path."""

    schema_version: Literal[1] = SCHEMA_VERSION  # type: ignore[assignment]
    patcher: str
    environments: dict[Literal["cpu", "cuda"], Environment]
    words: dict[Literal["cpu", "cuda"], str]
    """What the agents should know of the hardware."""
    seen: str
    """ISO 8601, UTC."""


class Refusal(Record):
    """A job that was not judged, and why."""

    kind: str
    message: str
    hint: str

    @property
    def error(self) -> PatcherError:
        return relayed(self.model_dump())


class JobResult(Record):
    """`result.json`: the verdict on one job, or why there is none."""

    schema_version: Literal[1] = SCHEMA_VERSION  # type: ignore[assignment]
    job: str | None
    """Digest of the job; None where the job was too damaged to have one."""
    evaluation: Evaluation | None = None
    refusal: Refusal | None = None
    machine: WorkerMachine

    @model_validator(mode="after")
    def _one_of_them(self) -> JobResult:
        if (self.evaluation is None) == (self.refusal is None):
            raise ValueError("a result is an evaluation or a refusal")
        return self

    def files(self) -> dict[str, str]:
        return {"result.json": _line(self)}


def post(
    op: Op, candidate: Candidate, settings: JudgeSettings, request_id: str, counters: bool = False
) -> JobFolder:
    """The job for a candidate.

    Raises:
        UsageError: the source is too long, or a setting is not one that a worker accepts.
    """
    try:
        job = JudgeJob(
            request_id=request_id,
            op=op.name,
            op_digest=op.digest,
            language=candidate.language,
            candidate_digest=candidate.digest,
            settings=JobSettings.of(settings),
            counters=counters,
        )
    except ValidationError as error:
        raise UsageError(f"this job is not valid: {problem(error)}", "give another value") from None
    files = job.files(candidate)
    if sum(len(text.encode()) for text in files.values()) > MOST_JOB_BYTES:
        raise UsageError(f"a job holds {MOST_JOB_BYTES:,} bytes at most", "shorten the source")
    return JobFolder(job, candidate, digest_of(files))


def read_job(folder: Path) -> JobFolder | None:
    """A job from its folder; None: it is not whole yet. Nothing of it has run, nor will before the
    op's digest is this machine's, too.

    Raises:
        VerificationError: it is malformed, too large, changed, or for another op library.
        UsageError: its op is unknown here, or its policy is none.
    """
    sealed = read_sealed(folder, MOST_JOB_BYTES)
    if sealed is None:
        return None
    job = _record(sealed, "job.json", JudgeJob, folder.name)
    candidate = Candidate(op=job.op, language=job.language, source="")
    if set(sealed.files) != {"job.json", candidate.file_name}:
        raise VerificationError(
            f"{folder.name} holds files that do not belong to a job", _MADE_AGAIN
        )
    candidate = candidate.model_copy(update={"source": sealed.files[candidate.file_name]})
    posted = JobFolder(job, candidate, sealed.digest)
    if posted.name != folder.name or candidate.digest != job.candidate_digest:
        raise VerificationError(
            f"{folder.name} is not the job that its name stands for", _MADE_AGAIN
        )
    if load_op(job.op).digest != job.op_digest:
        raise VerificationError(
            f"the worker's op {job.op} is not the one that asked: its contract, reference, inputs "
            "or baselines differ",
            "install the same patcher (and the same PATCHER_OPS) on both machines, and restart the "
            "worker: it reads an op once",
        )
    return posted


def read_result(folder: Path) -> JobResult | None:
    """The result in a folder; None: it is not whole yet.

    Raises:
        VerificationError: it is malformed, too large or changed.
    """
    sealed = read_sealed(folder, MOST_RESULT_BYTES)
    return None if sealed is None else _record(sealed, "result.json", JobResult, folder.name)


def folder_name(op: str, digest: str) -> str:
    return f"{op}-{digest[:16]}"


def machine_file(root: Path, machine: WorkerMachine) -> Path:
    """One file a machine, however often it serves."""
    told = machine.model_dump_json(exclude={"seen"})
    return root / "machines" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


_MADE_AGAIN = "remove it and resume the run, which writes it again"


def _record(sealed: SealedFolder, file: str, kind: type[RecordT], name: str) -> RecordT:
    try:
        return kind.model_validate_json(sealed.files[file])
    except KeyError:
        raise VerificationError(f"{name} holds no {file}", _MADE_AGAIN) from None
    except ValidationError as error:
        raise VerificationError(f"{file} of {name}: {problem(error)}", _MADE_AGAIN) from None


def _line(record: Record) -> str:
    return record.model_dump_json(indent=1, by_alias=True) + "\n"
