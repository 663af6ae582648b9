"""Create a folder of tasks: candidates in order, each examined in a worker, until enough are kept.

What is kept depends on the seed, the kind of device, the versions and the benchmarks alone, never
on a clock: times are measured and written beside. The folder can be resumed after a kill.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import Field, ValidationError

from patcher.bench import SCHEMA_VERSION, MissingError, Record, UsageError, VerificationError
from patcher.bench.judge import Progress
from patcher.bench.machine.environment import device_name
from patcher.runs.durable import held_alone, write_whole
from patcher.tasks.compose import DeviceKind
from patcher.tasks.datasheet import write_sheets
from patcher.tasks.examine import Examined
from patcher.tasks.known import KnownStructures, trace_known
from patcher.tasks.pool import WorkerPool, WorkerReply
from patcher.tasks.records import (
    CANDIDATES,
    CLASS_MS,
    INDEX,
    OPS,
    PROBLEMS,
    TIMES,
    Reason,
    Split,
    Task,
    TaskCandidate,
    Time,
)
from patcher.tasks.structure import GraphStructure

HEADER, KNOWN = "created.json", "known.json"
_MOST_TRIED = 200
"""Candidates that are examined for a folder beyond twenty a task."""


@dataclass(frozen=True)
class TaskOptions:
    """What is created."""

    count: int
    seed: int = 0
    device: DeviceKind = "cpu"
    held_out_pct: float = 10.0
    """Share of structures that are held out."""
    against: tuple[Path, ...] = ()
    """KernelBench problems that no task may resemble: files or folders."""
    compiled: bool | None = None
    """Whether torch.compile must run each module and agree; None: where there is a compiler."""
    workers: int = 1
    timeout_s: float = 300.0
    """Time limit of one candidate."""


class Header(Record):
    """`created.json`: what the tasks depend on, and so must be equal when the folder is resumed."""

    schema_version: int = SCHEMA_VERSION
    seed: int
    device: DeviceKind
    held_out_pct: float
    compiled: bool
    against: dict[str, str]
    """sha256 of each problem file, by name."""
    versions: dict[str, str]


class CreatedTasks(Record):
    """What `create_tasks` gives."""

    schema_version: int = SCHEMA_VERSION
    folder: str
    tasks: int
    held_out: int
    examined: int
    filtered: dict[Reason, int] = Field(default_factory=dict)
    """Candidates by reason."""


def create_tasks(out: Path, options: TaskOptions, report: Progress) -> CreatedTasks:
    """Create or resume a folder of tasks.

    Args:
        out: the folder: new, or one of the same options.
        report: called with the progress.

    Raises:
        UsageError: the folder holds something else, or more tasks than are asked for.
        MissingError: no compiler, though `compiled` asks for one.
        VerificationError: hardly any candidate passes the filters.
    """
    problems = _problem_files(options.against)
    header = _header(options, problems)
    _open(out, header)
    with (
        held_alone(out / HEADER, "creates tasks"),
        WorkerPool(options.workers, options.timeout_s) as pool,
    ):
        known_file = out / KNOWN
        known = None
        if known_file.is_file():
            known = KnownStructures.model_validate_json(known_file.read_bytes())
        known = trace_known(
            pool,
            problems,
            report,
            known,
            lambda found: write_whole(known_file, found.model_dump_json() + "\n"),
        )
        candidates = _Candidates(out, header, known)
        if len(candidates.tasks) > options.count:
            raise UsageError(
                f"{out} holds {len(candidates.tasks)} tasks already", "give that --count, or more"
            )
        _fill(candidates, pool, options, header, report)
    lines = "".join(f"{task.model_dump_json()}\n" for task in candidates.tasks)
    write_whole(out / INDEX, lines)
    created = header.model_dump(mode="json") | {"compile_asked": options.compiled is not False}
    write_sheets(out, created, candidates.all, known)
    return CreatedTasks(
        folder=str(out),
        tasks=len(candidates.tasks),
        held_out=sum(task.split == "held-out" for task in candidates.tasks),
        examined=len(candidates.all),
        filtered=candidates.reasons(),
    )


def _fill(
    candidates: _Candidates,
    pool: WorkerPool,
    options: TaskOptions,
    header: Header,
    report: Progress,
) -> None:
    """Examine candidates ahead, and take them in order, so that the outcome has one order."""
    ahead: deque[tuple[int, Future[WorkerReply]]] = deque()
    index = len(candidates.all)
    lock = str(candidates.folder / ".timing.lock")
    while len(candidates.tasks) < options.count:
        report("tasks", len(candidates.tasks), options.count)
        tried = len(candidates.all)
        if tried >= _MOST_TRIED + 20 * options.count or (tried >= 200 and not candidates.tasks):
            raise VerificationError(
                f"of {tried} candidates {len(candidates.tasks)} pass: {candidates.reasons()}",
                f"see their reasons in {candidates.folder / CANDIDATES}",
            )
        while len(ahead) < 2 * options.workers:
            given = {"seed": options.seed, "index": index, "device": options.device}
            future = pool.submit("candidate", **given, compiled=header.compiled, lock=lock)
            ahead.append((index, future))
            index += 1
        number, job = ahead.popleft()
        candidates.take(number, job.result())
    report("tasks", len(candidates.tasks), options.count)


class _Candidates:
    """The candidates so far, and their files."""

    def __init__(self, folder: Path, header: Header, known: KnownStructures) -> None:
        self.folder, self._header, self._known = folder, header, known
        self.all: list[TaskCandidate] = []
        path = folder / CANDIDATES
        kept = b""
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            try:
                self.all.append(TaskCandidate.model_validate_json(line))
            except ValidationError:
                break  # written in part when it was killed
            kept += line
        path.write_bytes(kept)
        self._structures = {each.task.structure for each in self.all if each.task}

    @property
    def tasks(self) -> list[Task]:
        return [each.task for each in self.all if each.task]

    def reasons(self) -> dict[Reason, int]:
        found: dict[Reason, int] = {}
        for each in self.all:
            found[each.reason] = found.get(each.reason, 0) + 1
        return found

    def take(self, index: int, job: WorkerReply) -> None:
        """Hold an examined candidate against the others, and write it down."""
        if job.result is None:
            reason: Reason = "timed out" if job.why == "timed out" else "crashed"
            candidate = TaskCandidate(index=index, reason=reason, detail=job.why)
        else:
            candidate = self._compared(Examined.model_validate(job.result))
        line = candidate.model_dump_json(exclude_defaults=True) + "\n"
        with (self.folder / CANDIDATES).open("a", encoding="utf-8") as file:
            file.write(line)
        self.all.append(candidate)

    def _compared(self, found: Examined) -> TaskCandidate:
        reason, detail, structure = found.reason, found.detail, found.structure
        if reason != "kept":
            return TaskCandidate(index=found.index, reason=reason, detail=detail)
        assert structure is not None
        if structure.digest in self._structures:
            return TaskCandidate(index=found.index, reason="duplicate", structure=structure)
        if near := self._known.like(structure):
            reason, detail = near
            return TaskCandidate(
                index=found.index, reason=reason, detail=detail, structure=structure
            )
        task = self._written(found, structure)
        self._structures.add(structure.digest)
        return TaskCandidate(index=found.index, reason="kept", task=task, structure=structure)

    def _written(self, found: Examined, structure: GraphStructure) -> Task:
        made = found.composition
        assert made is not None
        problem = f"{made.name}.py"
        files = {f"{PROBLEMS}/{problem}": made.source}
        files |= {f"{OPS}/{path}": text for path, text in found.files.items()}
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        low, high = CLASS_MS[made.size_class]
        timed = Time(
            op=found.op,
            ms=round(found.ms, 4),
            device=device_name(self._header.device),
            inside=low <= found.ms <= high,
        )
        with (self.folder / TIMES).open("a", encoding="utf-8") as file:
            file.write(timed.model_dump_json() + "\n")
        return Task(
            op=found.op,
            problem=problem,
            split=split_of(structure, self._header.held_out_pct),
            size_class=made.size_class,
            layout=made.layout,
            precision=made.precision,
            operators=made.operators,
            shapes=made.shapes,
            structure=structure.digest,
        )


def split_of(structure: GraphStructure, held_out_pct: float) -> Split:
    """The split of a structure, whatever the seed: all orders of the same operators share one."""
    drawn = int(structure.family[:8], 16) / 16**8
    return "held-out" if 100 * drawn < held_out_pct else "train"


def _problem_files(paths: tuple[Path, ...]) -> list[Path]:
    from patcher.integrate import problem_files

    found: list[Path] = []
    for path in paths:
        own = problem_files(path)
        if not own:
            raise UsageError(
                f"{path} has no KernelBench problem",
                "give Python files with Model, get_inputs and get_init_inputs",
            )
        found += own
    return found


def _header(options: TaskOptions, problems: list[Path]) -> Header:
    compiler = _has_compiler(options.device)
    if options.compiled and not compiler:
        raise MissingError("torch.compile finds no compiler here", "install g++, or --no-compile")
    return Header(
        seed=options.seed,
        device=options.device,
        held_out_pct=options.held_out_pct,
        compiled=compiler if options.compiled is None else options.compiled,
        against={
            f"{each.resolve().parent.name}/{each.name}": hashlib.sha256(
                each.read_bytes()
            ).hexdigest()
            for each in problems
        },
        versions={
            "patcher": version("patcher"),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
    )


def _has_compiler(device: DeviceKind) -> bool:
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _open(out: Path, header: Header) -> None:
    file = out / HEADER
    if file.is_file():
        try:
            earlier = Header.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise UsageError(f"{file} is damaged", "give a new folder") from error
        for name in Header.model_fields:
            if getattr(earlier, name) != getattr(header, name):
                raise UsageError(
                    f"{out} was created with another {name}: {getattr(earlier, name)!s:.200}",
                    "give the same options, or a new folder",
                )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not empty", "give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(file, header.model_dump_json(indent=1) + "\n")
