"""The folder of an A/B in blocks, from which an interrupted measurement continues."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from pydantic import AliasChoices, ConfigDict, Field, JsonValue

from patcher.ab.job import ABJob
from patcher.ab.quality_check import Served, Tokens
from patcher.ab.record_files import RecordOfFile, kept_until_done, read_record, write_record
from patcher.bench import SCHEMA_VERSION, Quality, Record, VerificationError, Window
from patcher.bench.ab.blocks import Block
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.engines.architecture import model_digest
from patcher.bench.machine.environment import fingerprint
from patcher.integrate import Patch, Receipt


class BlocksHeader(Record):
    """What all blocks of a folder have in common."""

    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    """Fingerprint of device, driver, libraries and threads."""
    arguments: dict[str, JsonValue]
    """The engine's arguments, in every process."""
    tuning: Tuning | None = None


class BlockRecord(Record):
    """One block, with the other measurements of its processes by name of a set."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_version: int = SCHEMA_VERSION
    block: Block = Field(validation_alias=AliasChoices("block", "wave"), serialization_alias="wave")
    greedy: dict[str, Tokens]
    """Greedy tokens: `before` (first block: before any patched process started), `again` (from the
    control), `after` (from the baseline of a later block)."""
    receipts: dict[str, dict[str, Receipt]]
    """Receipts of windows and other timed calls, by set and patch."""
    quality_receipts: dict[str, dict[str, Receipt]]
    """Receipts of the quality run, for sets that were in no earlier block."""
    other_workloads: dict[str, tuple[tuple[Window, ...], ...]] = Field(
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """Windows at each of the job's other workloads."""


class BlocksQuality(Record):
    """Quality of every set, and the routing entropy of the reference."""

    schema_version: int = SCHEMA_VERSION
    routing_entropy_pct: float | None
    quality: dict[str, Quality] = Field(default_factory=dict)


class BlockFolder:
    """Records, written atomically, and logits and answers until they are compared.

    Reading a damaged record raises `VerificationError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def header(self, make: Callable[[], BlocksHeader]) -> BlocksHeader:
        """The folder's header; if there is none, `make` creates it."""
        return self._remembered("begun.json", BlocksHeader, make)

    def blocks(self) -> list[BlockRecord]:
        found: list[BlockRecord] = []
        while (path := self._block(len(found))).is_file():
            found.append(self._read(path, BlockRecord))
        return found

    def keep(self, record: BlockRecord) -> None:
        write_record(self._block(record.block.number), record)

    def quality(self, make: Callable[[], BlocksQuality]) -> BlocksQuality:
        """The quality, made once; what it is made from is deleted."""
        found = self._remembered("quality.json", BlocksQuality, make)
        for path in self.path.glob("*.npy"):
            path.unlink()
        return found

    def _block(self, number: int) -> Path:
        return self.path / f"wave-{number}.json"

    def write_served(self, name: str, served: Served) -> None:
        for path, values in zip(self._served(name), served, strict=True):
            if values is not None:
                np.save(path, values.numpy(), allow_pickle=False)

    def served(self, name: str) -> Served:
        logits, *others = self._served(name)
        return Served(
            self._array(logits), *(self._array(one) if one.is_file() else None for one in others)
        )

    def _served(self, name: str) -> tuple[Path, Path, Path]:
        stem = self.path / hashlib.sha256(name.encode()).hexdigest()[:12]
        return Path(f"{stem}.npy"), Path(f"{stem}-answers.npy"), Path(f"{stem}-alone.npy")

    def _array(self, path: Path) -> torch.Tensor:
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise VerificationError(f"{path} is damaged", self._hint) from error

    def _remembered(
        self, name: str, kind: type[RecordOfFile], make: Callable[[], RecordOfFile]
    ) -> RecordOfFile:
        """The record in the file; if there is none, `make` creates it and it is written."""
        path = self.path / name
        if not path.is_file():
            write_record(path, make())
        return self._read(path, kind)

    def _read(self, path: Path, kind: type[RecordOfFile]) -> RecordOfFile:
        return read_record(path, kind, self._hint)

    @property
    def _hint(self) -> str:
        return f"remove {self.path} to measure again"


@contextmanager
def blocks_folder(job: ABJob, patches: Sequence[Patch], keep: Path | None) -> Iterator[Path]:
    """A folder for the blocks of this job with these patches, on this machine."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="patcher-blocks-") as folder:
            yield Path(folder)
        return
    here = fingerprint(job.workload.device, job.workload.threads)
    model = model_digest(job.workload)
    known = [job.model_dump_json(), here, model, *sorted(patch.digest for patch in patches)]
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
    with kept_until_done(keep / f"compare-{digest}") as folder:
        yield folder
