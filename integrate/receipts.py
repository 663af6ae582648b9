"""What ran in a process, as a record: no patch is accepted without one."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from patcher.bench import SCHEMA_VERSION, Record, UsageError, VerificationError

if TYPE_CHECKING:
    from patcher.integrate.counts import CallCounters

log = logging.getLogger("patcher")

_SECONDS = 1.0
"""Between two looks at the counts: a worker that is killed has told all but the last second."""


class Receipt(Record):
    """Calls of the patched kernel by shape, and calls that went to the original by reason."""

    schema_version: int = SCHEMA_VERSION
    patch_id: str
    digest: str
    """Of the patch bundle's manifest."""
    pid: int
    rank: int | None = None
    """Of a tensor parallel worker, where it has one."""
    point: str = ""
    """Engine and patch point, once the kernel is in."""
    failure: str | None = None
    """Why the kernel is not in, in a sentence; the engine's own runs."""
    calls: dict[str, int] = Field(default_factory=dict)
    """By kernel and shape: eager ones, and those of CUDA graphs times their replays."""
    replayed: dict[str, int] = Field(default_factory=dict)
    """Of these, those that ran in a graph."""
    fallbacks: dict[str, int] = Field(default_factory=dict)

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @classmethod
    def of(cls, book: CallCounters, point: str = "") -> Receipt:
        return cls(
            patch_id=book.patch_id,
            digest=book.digest,
            pid=book.pid,
            rank=own_rank(),
            point=point,
            calls=dict(book.calls),
            replayed=dict(book.replayed),
            fallbacks=dict(book.fallbacks),
        )

    def write(self, path: Path) -> None:
        """Write it whole, by rename."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Receipt:
        """Read one back.

        Raises:
            VerificationError: missing, or not a receipt.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise VerificationError(
                f"{path.name} is not a receipt", "run the patched engine again"
            ) from error


class ReceiptWriter:
    """Keeps a process's receipts in a folder up to date, each in a file of its own.

    A thread writes what has changed once a second, since workers of engines are mostly killed.
    """

    def __init__(self, folder: Path) -> None:
        """Begin.

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
        """Keep this book's receipt from now on."""
        self._books.append((book, point))
        self.write()

    def put(self, receipt: Receipt) -> None:
        """A receipt that will not change."""
        receipt.write(self._path(receipt))

    def write(self) -> None:
        """Write what has changed."""
        with self._lock:
            for book, point in list(self._books):
                receipt = Receipt.of(book, point)
                path = self._path(receipt)
                if self._written.get(path) != receipt:
                    receipt.write(path)
                    self._written[path] = receipt

    def close(self) -> None:
        """Write a last time."""
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
                log.exception("receipts cannot be written any more: what runs from now on is lost")
                return

    def _path(self, receipt: Receipt) -> Path:
        return self._folder / f"{receipt.patch_id}.{receipt.pid}.json"


def read_receipts(folder: Path) -> list[Receipt]:
    """Every receipt in a folder, by patch and process.

    Raises:
        VerificationError: one is damaged.
    """
    return [Receipt.read(path) for path in sorted(folder.glob("*.json"))]


def own_rank() -> int | None:
    """This process's rank, as our adapters or the launchers (torchrun, MPI, Slurm) say it."""
    for name in ("PATCHER_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
