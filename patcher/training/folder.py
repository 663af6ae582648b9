"""The folder of a training: what was asked for, checkpoints, one line of metrics an update.

`training.json` (the options), `checkpoints/` (adapter, optimiser, scheduler, random states),
`metrics.jsonl`, `adapter/` (the newest), and what a kind of training adds. A killed training goes
on from its newest whole checkpoint; lines of later updates are dropped and made again.
"""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Record, UsageError
from patcher.runs import durable
from patcher.training.line_file import LineFile
from patcher.training.replies import SampledReply
from patcher.training.weights import ADAPTER

ABOUT, CHECKPOINTS, METRICS = "training.json", "checkpoints", "metrics.jsonl"
SAMPLES, VERDICTS = "samples.jsonl", "verdicts.jsonl"
Kind = Literal["warm-up", "reinforce", "evaluate"]


class UpdateMetrics(Record):
    """One update: a line of `metrics.jsonl`."""

    schema_version: int = SCHEMA_VERSION
    update: int
    """From 1."""
    loss: float | None = None
    tokens: int
    """Of sampled replies, or trained on."""
    training_s: float
    generating_s: float = 0.0
    judging_s: float = 0.0
    replies: int = 0
    """Sampled; 0 in a warm-up and in the later updates of a round, and nothing of what follows."""
    reward: float | None = None
    """Mean."""
    shares: dict[str, float] = Field(default_factory=dict)
    """Of the replies, by the names of `patcher.training.replies.SHARES`."""
    cut_off: float | None = None
    """Share of replies that reached the limit of tokens."""
    flat_tasks: float | None = None
    """Share of tasks whose replies all had one reward, from which nothing is learned."""
    lost: int = 0
    """Replies whose judge died, which count as wrong."""
    unjudged: int = 0
    """Replies that the judge's machine was too busy for: without a reward, and not in the update
    nor in what is said of rewards and shares."""
    skipped_tasks: int = 0
    """Tasks of which no reply was judged, from which nothing is learned."""


class TrainingSummary(Record):
    """Where a training stands."""

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    folder: str
    updates: int
    """Done."""
    asked: int
    adapter: str | None
    last: UpdateMetrics | None


class TrainingOptions(Record):
    """What a training was begun with. A field in `FREE` may differ when it goes on."""

    FREE: ClassVar[frozenset[str]] = frozenset()
    judging: str = ""
    """What verdicts depend on, beside the machine."""


class Checkpoint(NamedTuple):
    """A whole one."""

    path: Path
    update: int


class TrainingFolder:
    """A folder of one training; made by `open_training`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = LineFile(path / METRICS, UpdateMetrics)
        self.samples = LineFile(path / SAMPLES, SampledReply)
        self.verdicts = path / VERDICTS
        self.adapter = path / ADAPTER

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that was written to its end."""
        found = [
            Checkpoint(state.parent, update)
            for state in self.checkpoints.glob("checkpoint-*/trainer_state.json")
            if (update := _update(state)) is not None
        ]
        return max(found, key=lambda each: each.update, default=None)

    def rewind(self) -> Checkpoint | None:
        """Drop what is newer than the newest checkpoint, which is returned."""
        newest = self.newest()
        update = newest.update if newest else 0
        self.metrics.keep(lambda each: each.update <= update)
        self.samples.keep(lambda each: each.number <= update)
        for other in self.checkpoints.glob("checkpoint-*"):
            if newest is None or int(other.name.partition("-")[2]) > update:
                shutil.rmtree(other)  # it was not written to its end
        return newest

    def save_adapter(self, model: Any) -> None:
        """Write the adapter in place of the last."""
        self._replace_adapter(lambda staged: model.save_pretrained(str(staged)))

    def adopt_adapter(self, checkpoint: Checkpoint) -> None:
        """Have that of a checkpoint, after a kill."""

        def copy(staged: Path) -> None:
            staged.mkdir()
            for file in checkpoint.path.glob("adapter_*"):
                shutil.copy(file, staged)

        self._replace_adapter(copy)

    def _replace_adapter(self, write: Callable[[Path], object]) -> None:
        staged = self.path / f".{ADAPTER}.tmp"
        shutil.rmtree(staged, ignore_errors=True)
        write(staged)
        shutil.rmtree(self.adapter, ignore_errors=True)
        staged.replace(self.adapter)
        durable.sync_folder(self.path)

    def summary(self, kind: Kind, asked: int) -> TrainingSummary:
        """Where it stands."""
        lines = self.metrics.read()
        return TrainingSummary(
            kind=kind,
            folder=str(self.path),
            updates=lines[-1].update if lines else 0,
            asked=asked,
            adapter=str(self.adapter) if self.adapter.is_dir() else None,
            last=lines[-1] if lines else None,
        )


class Deadline:
    """When to stop.

    Args:
        minutes: from `begun_s` on; None: never.
        begun_s: `time.monotonic()` when the command began; None: now.
    """

    def __init__(self, minutes: float | None, begun_s: float | None = None) -> None:
        begun = time.monotonic() if begun_s is None else begun_s
        self._until_s = None if minutes is None else begun + 60 * minutes
        self.hit = False
        """Whether it has ended something."""

    def left_s(self) -> float | None:
        """Seconds that are left, none below 0; None: there is no limit."""
        return None if self._until_s is None else max(self._until_s - time.monotonic(), 0.0)

    def leaves(self, needed_s: float) -> bool:
        """Whether so much time is left; if not, it is hit."""
        if self._until_s is not None and time.monotonic() + needed_s > self._until_s:
            self.hit = True
        return not self.hit


@contextmanager
def open_training(path: Path, kind: Kind, options: TrainingOptions) -> Iterator[TrainingFolder]:
    """A new folder, or one to go on with, which no other process may use meanwhile.

    Raises:
        UsageError: it holds something else, or was begun with other options.
    """
    if path.is_dir() and any(path.iterdir()) and not (path / ABOUT).is_file():
        raise UsageError(f"{path} is not empty and no training", "give a new folder")
    durable.make_folder(path)
    with durable.held_alone(path / ".lock", "trains"):
        asked = {
            "kind": kind,
            "options": options.model_dump(mode="json", exclude=set(options.FREE)),
        }
        if not (path / ABOUT).is_file():
            durable.write_whole(path / ABOUT, json.dumps(asked, indent=1) + "\n")
        _require_same(path, asked)
        yield TrainingFolder(path)


def _require_same(path: Path, asked: dict[str, Any]) -> None:
    try:
        begun = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        differ = [
            _difference(name, begun["options"].get(name), value)
            for name, value in asked["options"].items()
            if begun["options"].get(name, value) != value
        ]
        kind = begun["kind"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path / ABOUT} is damaged", "give a new folder") from error
    if kind != asked["kind"]:
        raise UsageError(f"{path} holds another kind of work: {kind}", "give a new folder")
    if differ:
        said = "; ".join(each if len(each) < 200 else f"{each[:200]}..." for each in differ)
        raise UsageError(f"{path} was begun with other options: {said}", "give those, or a new one")


def _difference(name: str, was: Any, now: Any) -> str:
    if name == "adapter" and was and now:
        return f"--adapter is another one: its content was {was[:12]}, is {now[:12]}"
    return f"{name} was {was!r}, is {now!r}"


def read_metrics(path: Path) -> list[UpdateMetrics]:
    """The metrics of a training.

    Raises:
        UsageError: the folder has none.
    """
    found = TrainingFolder(path).metrics.read()
    if not found:
        raise UsageError(
            f"{path} has no {METRICS}", "give a folder of `patcher train warm-up` or `reinforce`"
        )
    return found


def _update(state: Path) -> int | None:
    """The update of a checkpoint whose last file this is; None where that is not whole."""
    try:
        update = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    named = f"checkpoint-{update}" == state.parent.name
    return update if named and _readable(state.parent) else None


def _readable(checkpoint: Path) -> bool:
    """Not where a power cut or a copy left half of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        for each in checkpoint.glob("*.safetensors"):
            safe_open(each, "np")
    except SafetensorError:
        return False
    return all(map(zipfile.is_zipfile, checkpoint.glob("*.pt*")))
