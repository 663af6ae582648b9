"""The machine that judges for others: takes jobs from a folder, one after the other, and writes
their results.

A claim is a lock that the kernel frees when its process dies, so that a job whose worker was
killed is taken by the next one. Jobs are foreign: each is read with limits and held against its
digests and this machine's op library before anything of it runs, and then judged as any candidate.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, Self

from patcher.bench import (
    SCHEMA_VERSION,
    BusyError,
    Evaluation,
    MissingError,
    PatcherError,
    Record,
    UsageError,
    load_op,
)
from patcher.bench.judge import Progress, open_judge
from patcher.bench.machine.environment import describe
from patcher.bench.toolchains import build
from patcher.judges.counters import CandidateJudge, with_counters
from patcher.judges.hardware import hardware_facts
from patcher.judges.jobs import (
    FOLDER_NAME,
    JobFolder,
    JobResult,
    JobSettings,
    Refusal,
    WorkerMachine,
    machine_file,
    read_job,
    read_result,
)
from patcher.judges.seal import seal

MOST_ATTEMPTS = 3
"""Workers that one job may end before it is refused."""


class WorkerSummary(Record):
    """What became of one job."""

    job: str
    outcome: str
    """Of the evaluation, or `refused`, `left` (this machine lacks what it needs), `busy` (left,
    too: it has too little time), or `failed`."""
    detail: str = ""
    seconds: float | None = None


class Shift(Record):
    """What one round over the folder did."""

    schema_version: int = SCHEMA_VERSION
    jobs: tuple[WorkerSummary, ...] = ()
    incomplete: tuple[str, ...] = ()
    """Folders that are still being copied."""


class Worker:
    """Serves a folder; a context manager. The judge is kept open while jobs ask for the same."""

    def __init__(self, root: Path, report: Progress, say: Callable[[WorkerSummary], None]) -> None:
        self.root = root
        self._report, self._say = report, say
        self._left: set[str] = set()
        self._open = ExitStack()
        self._settings: JobSettings | None = None

    def __enter__(self) -> Self:
        """Raises:
        UsageError: the folder does not exist, or cannot be written.
        """
        if not self.root.is_dir():
            raise UsageError(
                f"{self.root} is no folder",
                "give the DIR of --judge exchange:DIR, or create it if its jobs come later",
            )
        try:
            for name in ("jobs", "results", "claims", "machines"):
                folder = self.root / name
                folder.mkdir(parents=True, exist_ok=True)
                if folder.is_symlink():
                    raise UsageError(f"{folder} is a link", "give a folder of plain folders")
            self.machine = this_machine()
            file = machine_file(self.root, self.machine)
            staged = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
            staged.write_text(self.machine.model_dump_json(indent=1) + "\n", encoding="utf-8")
            staged.replace(file)
        except OSError as error:
            raise UsageError(
                f"cannot use {self.root}: {error.strerror}", "give a folder that can be written"
            ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        self._open.close()
        self._settings = None

    def serve(self) -> Shift:
        """Judge every job that is there and that no other worker has."""
        served: list[WorkerSummary] = []
        incomplete: list[str] = []
        waiting = self._waiting()
        if len(waiting) > 1:
            self._build_ahead(waiting)
        for name in waiting:
            with self._claimed(name) as attempts:
                if attempts is None or self._has_result(name):
                    continue
                found = self._one(name, attempts)
            if found is None:
                incomplete.append(name)
                continue
            served.append(found)
            self._say(found)
        return Shift(jobs=tuple(served), incomplete=tuple(incomplete))

    def _waiting(self) -> list[str]:
        """Folders of jobs without a result, the oldest first."""
        found = []
        with os.scandir(self.root / "jobs") as entries:
            for entry in entries:
                if FOLDER_NAME.fullmatch(entry.name) and entry.name not in self._left:
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        return [name for _, name in sorted(found) if not self._has_result(name)]

    def _build_ahead(self, names: Sequence[str]) -> None:
        """Compilers run side by side before anything is timed, and the judge finds what they made.
        What cannot be read or built is told when it is judged.
        """

        with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
            folders = [self.root / "jobs" / name for name in names]
            for done, _ in enumerate(pool.map(build_ahead, folders)):
                self._report("build", done, len(names))

    def _has_result(self, name: str) -> bool:
        try:
            return read_result(self.root / "results" / name) is not None
        except PatcherError:
            return True  # changed by someone: it is for whoever asked to say so

    @contextmanager
    def _claimed(self, name: str) -> Iterator[int | None]:
        """Hold the job: how many workers died over it before; None: another one has it."""
        handle = os.open(self.root / "claims" / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            attempts = os.read(handle, 1 << 12).count(b"\n")
            os.write(handle, f"{os.getpid()}\n".encode())
            try:
                yield attempts
            finally:  # Ctrl-C, too: it is nobody's again
                os.ftruncate(handle, 0)
        finally:
            os.close(handle)

    def _one(self, name: str, attempts: int) -> WorkerSummary | None:
        posted: JobFolder | None = None
        try:
            posted = read_job(self.root / "jobs" / name)
            if posted is None:
                return None
            if attempts >= MOST_ATTEMPTS:
                raise UsageError(
                    f"it ended {attempts} workers that judged it", "look at the worker's machine"
                )
            evaluation = self._judged(posted)
        except MissingError as error:
            self._close()  # a device that stopped answering is tried from anew
            self._left.add(name)
            outcome = "busy" if isinstance(error, BusyError) else "left"
            return WorkerSummary(job=name, outcome=outcome, detail=f"{error.message}; {error.hint}")
        except PatcherError as error:
            refusal = Refusal.model_validate(error.as_dict())
            digest = posted.digest if posted else None
            self._write(name, JobResult(job=digest, refusal=refusal, machine=self.machine))
            return WorkerSummary(job=name, outcome="refused", detail=error.message)
        except Exception as error:  # the judge's own defect: the jobs behind it are served
            self._close()
            self._left.add(name)
            traceback.print_exc()
            told = f"the judge failed: {type(error).__name__}: {error}"
            return WorkerSummary(job=name, outcome="failed", detail=told)
        self._write(name, JobResult(job=posted.digest, evaluation=evaluation, machine=self.machine))
        speedup = evaluation.geomean_speedup
        detail = ""
        if speedup is not None:
            silent = [f"{name} did not run" for name in evaluation.missing_baselines]
            detail = ", ".join([f"{speedup:.3f} x {evaluation.baseline}", *silent])
        return WorkerSummary(
            job=name, outcome=evaluation.outcome, detail=detail, seconds=evaluation.total_s
        )

    def _judged(self, posted: JobFolder) -> Evaluation:
        if self._settings != posted.job.settings:
            self._close()
            self._judge = self._open.enter_context(open_judge(posted.job.settings.settings()))
            self._settings = posted.job.settings
        evaluate: CandidateJudge = partial(self._judge.evaluate, report=self._report)
        if posted.job.counters:
            evaluate = with_counters(evaluate, posted.job.settings.sweep, self._no_counters)
        return evaluate(posted.candidate)

    def _no_counters(self, why: str) -> None:
        self._report(f"judging ({why})", 0, 1)

    def _write(self, name: str, result: JobResult) -> None:
        try:
            seal(self.root / "results" / name, result.files())
        except OSError as error:
            raise UsageError(
                f"cannot write the result of {name}: {error.strerror}", "fix that and start again"
            ) from error


def build_ahead(folder: Path) -> None:
    """Compile a job's candidate into the cache. What cannot be read or built is told when it is
    judged.
    """
    with suppress(PatcherError):
        posted = read_job(folder)
        # one that does not even name its op is never built
        if posted is not None and posted.job.op in posted.candidate.source:
            build(posted.candidate, load_op(posted.job.op).contract)


def this_machine() -> WorkerMachine:
    """What this worker judges on."""
    import torch

    kinds: list[Literal["cpu", "cuda"]] = ["cpu"]
    if torch.cuda.is_available():
        kinds.append("cuda")
    return WorkerMachine(
        patcher=importlib.metadata.version("patcher"),
        environments={kind: describe(kind) for kind in kinds},
        words={kind: hardware_facts(kind) for kind in kinds},
        seen=datetime.now(UTC).isoformat(timespec="seconds"),
    )
