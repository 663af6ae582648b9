"""What is written of tasks: one record a task, one a candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from patcher.bench import SCHEMA_VERSION, Record, UsageError
from patcher.tasks.structure import GraphStructure

INDEX, CANDIDATES, TIMES = "tasks.jsonl", "candidates.jsonl", "times.jsonl"
PROBLEMS, OPS = "problems", "ops"
R = TypeVar("R", bound=Record)
Split = Literal["train", "held-out"]
CLASS_MS = {"large": (1.0, 100.0), "decode": (0.0, 100.0)}
"""Bounds in milliseconds of the measured time of eager, by size class."""
Reason = Literal[
    "kept",
    "does not fit",
    "eager fails",
    "not finite",
    "not deterministic",
    "constant",
    "cannot be an op",
    "no structure",
    "judge cannot tell",
    "compile fails",
    "compile differs",
    "timed out",
    "crashed",
    "duplicate",
    "like a benchmark's",
    "like an op of the library",
]
"""What became of a candidate: kept, or the first filter that it did not pass."""


class Task(Record):
    """One task: a line of `tasks.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    op: str
    """Its op in `ops/`."""
    problem: str
    """Its file in `problems/`, of KernelBench's form."""
    split: Split
    size_class: Literal["large", "decode"]
    layout: str
    precision: str
    operators: tuple[str, ...]
    """Seeds that it is composed of, in order."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the inputs."""
    structure: str
    """Digest of its graph."""


class Time(Record):
    """A measured time of eager: a line of `times.jsonl`."""

    op: str
    ms: float
    """Median over five calls of the module in float32 at the file's sizes."""
    device: str
    inside: bool
    """Whether it lies in the bounds of its size class."""


class TaskCandidate(Record):
    """What became of a candidate: a line of `candidates.jsonl`."""

    index: int
    reason: Reason
    detail: str = ""
    task: Task | None = None
    structure: GraphStructure | None = None


def load_tasks(folder: Path, split: Split | None = None, timed: bool = False) -> list[Task]:
    """The tasks of a folder that `patcher tasks create` made.

    Args:
        folder: the folder.
        split: only this split.
        timed: only those whose measured time lies in the bounds of their class.

    Raises:
        UsageError: there are none.
    """
    if not (folder / INDEX).is_file():
        raise UsageError(f"{folder} has no {INDEX}", "create it: patcher tasks create")
    tasks = _records(folder / INDEX, Task)
    inside = {each.op for each in load_times(folder) if each.inside}
    return [
        task for task in tasks if split in (None, task.split) and (not timed or task.op in inside)
    ]


def load_times(folder: Path) -> list[Time]:
    """The measured times of a folder of tasks."""
    return _records(folder / TIMES, Time)


def _records(path: Path, kind: type[R]) -> list[R]:
    lines = path.read_bytes().splitlines() if path.is_file() else []
    try:
        return [kind.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise UsageError(f"{path} is damaged", "restore it, or create a new folder") from error
