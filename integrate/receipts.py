"""Receipts: records of what ran in a process; no patch is accepted without one."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from patcher.bench import SCHEMA_VERSION, Record, UsageError, VerificationError
from patcher.integrate.layers import LayerSurvey

if TYPE_CHECKING:
    from patcher.integrate.counts import CallCounters

log = logging.getLogger("patcher")

_SECONDS = 1.0
"""Interval between writes: a killed worker loses at most the counts of one second."""


class Receipt(Record):
    """Calls of one patch's kernel in one process, and its fallbacks to the original."""

    schema_version: int = SCHEMA_VERSION
    patch_id: str
    digest: str
    """Digest of the patch's manifest."""
    pid: int
    """The process."""
    rank: int | None = None
    """Rank of a tensor-parallel worker; None if it has no rank."""
    point: str = ""
    """Engine and patch point, as `engine:point`."""
    failure: str | None = None
    """Why the patch was not installed, one sentence; None if it was."""
    calls: dict[str, int] = Field(default_factory=dict)
    """Calls by kernel and shape: eager ones, plus those of CUDA graphs times their replays."""
    replayed: dict[str, int] = Field(default_factory=dict)
    """The part of `calls` that ran in CUDA graphs."""
    fallbacks: dict[str, int] = Field(default_factory=dict)
    """Calls of the engine's own kernel instead, by reason."""

    layers_taken: int | None = None
    """Layers of the patch point's role that the patch takes in this process's models; None if no
    model was looked at."""
    layers_refused: dict[str, int] = Field(default_factory=dict)
    """Layers of that role that keep the engine's own code, by reason."""

    @property
    def layers(self) -> LayerSurvey | None:
        """The layers of the patch point's role; None if no model was looked at."""
        if self.layers_taken is None:
            return None
        return LayerSurvey(self.layers_taken, Counter(self.layers_refused))

    @property
    def idle(self) -> str | None:
        """Why the patch has no effect in this process so far, in words; None if its kernel ran, or
        if it was not installed.
        """
        if self.failure is not None or self.calls:
            return None
        layers = self.layers
        if layers is not None and not layers.taken:
            return f"no layer takes it ({layers})" if layers.total else "no layer is of its role"
        if self.fallbacks:
            return "every call fell back"
        return "no call reached it"

    @property
    def total_calls(self) -> int:
        """The number of calls of the patched kernel."""
        return sum(self.calls.values())

    @classmethod
    def of(cls, book: CallCounters, point: str = "") -> Receipt:
        """A receipt with the current counts of this process."""
        layers = book.layers
        return cls(
            patch_id=book.patch_id,
            digest=book.digest,
            pid=book.pid,
            rank=own_rank(),
            point=point,
            calls=dict(book.calls),
            replayed=dict(book.replayed),
            fallbacks=dict(book.fallbacks),
            layers_taken=None if layers is None else layers.taken,
            layers_refused={} if layers is None else dict(layers.refused),
        )

    def write(self, path: Path) -> None:
        """Write the receipt atomically, by rename."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Receipt:
        """Read a receipt.

        Raises:
            VerificationError: the file is missing or not a receipt.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise VerificationError(
                f"{path.name} is not a receipt", "run the patched engine again"
            ) from error


class ReceiptWriter:
    """Keeps the receipts of a process up to date in a folder, one file per patch.

    A thread writes changed receipts once a second, since engines usually kill their workers.
    """

    def __init__(self, folder: Path) -> None:
        """Start the writing thread.

        Raises:
            UsageError: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"cannot write receipts to {folder}: {error.strerror}",
                "set PATCHER_RECEIPTS to a writable folder",
            ) from error
        self._folder = folder
        self._books: list[tuple[CallCounters, str]] = []
        self._written: dict[Path, Receipt] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patcher-receipts", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, book: CallCounters, point: str) -> None:
        """Write receipts of these counters from now on."""
        self._books.append((book, point))
        self.write()

    def put(self, receipt: Receipt) -> None:
        """Write a receipt that will not change."""
        receipt.write(self._path(receipt))

    def write(self) -> None:
        """Write the receipts that have changed."""
        with self._lock:
            for book, point in list(self._books):
                receipt = Receipt.of(book, point)
                path = self._path(receipt)
                if self._written.get(path) != receipt:
                    receipt.write(path)
                    self._written[path] = receipt

    def close(self) -> None:
        """Stop the thread and write a last time; idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self.write()
            atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            try:
                self.write()
            except OSError:
                log.exception("receipts cannot be written: calls from now on are not recorded")
                return

    def _path(self, receipt: Receipt) -> Path:
        return self._folder / f"{receipt.patch_id}.{receipt.pid}.json"


def read_receipts(folder: Path) -> list[Receipt]:
    """Read every receipt in a folder, sorted by file name (patch and process).

    Raises:
        VerificationError: a receipt is damaged.
    """
    return [Receipt.read(path) for path in sorted(folder.glob("*.json"))]


def idle_patches(receipts: Sequence[Receipt]) -> dict[str, str]:
    """Patches whose kernel ran in no process, and why, as far as processes had it installed."""
    reasons: dict[str, dict[str, None]] = {}
    for one in receipts:
        said = reasons.setdefault(one.patch_id, {})
        if one.idle is not None:
            said[one.idle] = None
    ran = {one.patch_id for one in receipts if one.calls}
    return {name: "; ".join(why) for name, why in reasons.items() if name not in ran}


def own_rank() -> int | None:
    """This process's rank from the variables of our adapters, torchrun, MPI or Slurm."""
    for name in ("PATCHER_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
