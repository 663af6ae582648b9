"""The folder of an A/B in blocks: what it has, a second start need not take again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pydantic import AliasChoices, ConfigDict, Field, JsonValue

from patcher.ab.quality_check import Tokens
from patcher.ab.record_files import RecordOfFile, read_record, write_record
from patcher.bench import SCHEMA_VERSION, Quality, Record, VerificationError, Window
from patcher.bench.ab.blocks import Block
from patcher.bench.ab.engine_config import Tuning
from patcher.integrate import Receipt


class BlocksHeader(Record):
    """What holds for all blocks of a folder."""

    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    """Of device, driver, libraries and threads."""
    arguments: dict[str, JsonValue]
    """Of the engine, in every process."""
    tuning: Tuning | None = None


class BlockRecord(Record):
    """One block, and what its processes were asked beside the windows; by name of a set."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_version: int = SCHEMA_VERSION
    block: Block = Field(validation_alias=AliasChoices("block", "wave"), serialization_alias="wave")
    greedy: dict[str, Tokens]
    """`before` (first block: before any patched process was started), `again` (by its control),
    `after` (by the baseline of a later block)."""
    receipts: dict[str, dict[str, Receipt]]
    """By patch, too: of windows and what else was timed."""
    quality_receipts: dict[str, dict[str, Receipt]]
    """Of the quality run; of sets that were in no block before."""
    other_workloads: dict[str, tuple[tuple[Window, ...], ...]] = Field(
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """At each of the job's other workloads."""


class BlocksQuality(Record):
    """Quality of every set, and what the reference said beside it."""

    schema_version: int = SCHEMA_VERSION
    routing_entropy_pct: float | None
    quality: dict[str, Quality] = Field(default_factory=dict)


class BlockFolder:
    """Records, each whole or not there, and logits until they are compared.

    What is read raises `VerificationError` where it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def header(self, make: Callable[[], BlocksHeader]) -> BlocksHeader:
        """What the folder begins with, else what is made now."""
        return self._remembered("begun.json", BlocksHeader, make)

    def blocks(self) -> list[BlockRecord]:
        found: list[BlockRecord] = []
        while (path := self._block(len(found))).is_file():
            found.append(self._read(path, BlockRecord))
        return found

    def keep(self, record: BlockRecord) -> None:
        write_record(self._block(record.block.number), record)

    def quality(self, make: Callable[[], BlocksQuality]) -> BlocksQuality:
        """The logits are not kept any longer."""
        found = self._remembered("quality.json", BlocksQuality, make)
        for path in self.path.glob("*.npy"):
            path.unlink()
        return found

    def _block(self, number: int) -> Path:
        return self.path / f"wave-{number}.json"

    def write_logits(self, name: str, logits: torch.Tensor) -> None:
        np.save(self._logits(name), logits.numpy(), allow_pickle=False)

    def logits(self, name: str) -> torch.Tensor:
        path = self._logits(name)
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise VerificationError(f"{path} is damaged", self._hint) from error

    def _logits(self, name: str) -> Path:
        return self.path / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}.npy"

    def _remembered(
        self, name: str, kind: type[RecordOfFile], make: Callable[[], RecordOfFile]
    ) -> RecordOfFile:
        """What the file holds, else what is made now, which it holds from then on."""
        path = self.path / name
        if not path.is_file():
            write_record(path, make())
        return self._read(path, kind)

    def _read(self, path: Path, kind: type[RecordOfFile]) -> RecordOfFile:
        return read_record(path, kind, self._hint)

    @property
    def _hint(self) -> str:
        return f"remove {self.path} to measure anew"
