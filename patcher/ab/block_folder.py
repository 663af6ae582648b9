"""The folder of a sitting in waves: what it has, a second start need not take again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, JsonValue

from patcher.ab.record_files import Kept, read_record, write_record
from patcher.bench import SCHEMA_VERSION, Quality, Record, VerificationError, Window
from patcher.bench.ab.blocks import Block
from patcher.bench.ab.engine_config import Tuning
from patcher.integrate import Receipt

Tokens = list[list[int]]
"""[batch][tokens]"""


class BlocksHeader(Record):
    """What holds for all waves of a folder."""

    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    """Of device, driver, libraries and threads."""
    arguments: dict[str, JsonValue]
    """Of the engine, in every process."""
    tuning: Tuning | None = None


class BlockRecord(Record):
    """One wave, and what its processes were asked beside the windows; by name of a set."""

    schema_version: int = SCHEMA_VERSION
    wave: Block
    greedy: dict[str, Tokens]
    """`before` (first wave: before any patched process was started), `again` (by its control),
    `after` (by the baseline of a later wave)."""
    receipts: dict[str, dict[str, Receipt]]
    """By patch, too: of windows and what else was timed."""
    quality_receipts: dict[str, dict[str, Receipt]]
    """Of the quality run; of sets that were in no wave before."""
    elsewhere: dict[str, tuple[tuple[Window, ...], ...]]
    """At each of the job's other points."""


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

    def begun(self, make: Callable[[], BlocksHeader]) -> BlocksHeader:
        return self._kept("begun.json", BlocksHeader, make)

    def waves(self) -> list[BlockRecord]:
        found: list[BlockRecord] = []
        while (path := self.path / f"wave-{len(found)}.json").is_file():
            found.append(self._read(path, BlockRecord))
        return found

    def keep(self, taken: BlockRecord) -> None:
        write_record(self.path / f"wave-{taken.wave.number}.json", taken)

    def compared(self, make: Callable[[], BlocksQuality]) -> BlocksQuality:
        """The logits are not kept any longer."""
        found = self._kept("quality.json", BlocksQuality, make)
        for path in self.path.glob("*.npy"):
            path.unlink()
        return found

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

    def _kept(self, name: str, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """What the file holds, else what is made now, which it holds from then on."""
        path = self.path / name
        if not path.is_file():
            write_record(path, make())
        return self._read(path, kind)

    def _read(self, path: Path, kind: type[Kept]) -> Kept:
        return read_record(path, kind, self._hint)

    @property
    def _hint(self) -> str:
        return f"remove {self.path} to measure anew"
