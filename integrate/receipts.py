"""Receipts: records of what ran in a process; no patch is accepted without one."""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import socket
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
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
    host: str = ""
    """The machine or container; "" in receipts of older versions."""
    namespace: str = ""
    """A digest of the machine's boot and the process's id namespace, in which `pid` is unique."""
    pid: int
    """The process."""
    started: int = 0
    """When the counters started, in nanoseconds since 1970; 0 in receipts of older versions."""
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
    def file_name(self) -> str:
        """The name of its file, which no other process or host has."""
        rank = "" if self.rank is None else f"rank{self.rank}."
        host = re.sub(r"[^A-Za-z0-9-]", "-", self.host)[:63]
        where = f"{host}-{self.namespace}." if self.namespace else ""
        return f"{self.patch_id}.{rank}{where}{self.pid}-{self.started:x}.json"

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
            host=socket.gethostname(),
            namespace=_namespace(),
            pid=book.pid,
            started=book.started,
            rank=own_rank(),
            point=point,
            calls=dict(book.calls),
            replayed=dict(book.replayed),
            fallbacks=dict(book.fallbacks),
            layers_taken=None if layers is None else layers.taken,
            layers_refused={} if layers is None else dict(layers.refused),
        )

    def by_rank(self) -> Receipt:
        """The same receipt with the rank before each kernel and reason, so that receipts of several
        ranks can be added up.
        """
        named = {
            field: {
                f"rank {self.rank}: {key}": count for key, count in getattr(self, field).items()
            }
            for field in ("calls", "replayed", "fallbacks", "layers_refused")
        }
        return self.model_copy(update=named)

    def write(self, path: Path) -> None:
        """Write the receipt atomically, by rename; a signal's handler may do so meanwhile."""
        temporary = path.with_name(f".{path.name}.{next(_WRITES)}.tmp")
        try:
            temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except BaseException:  # also what a handler raises
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

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
    """Keeps the receipts of a process up to date in a folder, one file per patch and process.

    A thread writes changed receipts once a second, since engines usually kill their workers. Where
    a volume is full, the receipts are written as soon as it has room: no call fails for that. A
    process that is forked counts from zero, in receipts of its own. Handlers of signals may write
    and close, and may raise.
    """

    def __init__(self, folder: Path) -> None:
        """Start the writing thread.

        Raises:
            UsageError: the folder cannot be written, though its volume is not full.
        """
        self._folder = folder = folder.absolute()  # the process may go to another one
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{socket.gethostname()}.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno not in _FULL:
                raise UsageError(
                    f"cannot write receipts to {folder}: {error.strerror}",
                    "set PATCHER_RECEIPTS to a writable folder",
                ) from error
        self._books: list[tuple[CallCounters, str]] = []
        self._fixed: list[Receipt] = []
        self._written: dict[Path, Receipt] = {}
        self._failing = self._forked = self._closed = False
        self._at_end: multiprocessing.util.Finalize | None = None
        self._turns = 0
        """Calls of `write`: a handler's, inside of another, has later counts."""
        self._start()
        _WRITERS.add(self)
        multiprocessing.util.register_after_fork(self, ReceiptWriter._close_in_child)
        if multiprocessing.parent_process() is not None:
            self._close_in_child()

    def add(self, book: CallCounters, point: str) -> None:
        """Write receipts of these counters from now on."""
        self._books.append((book, point))
        self.write()

    def put(self, receipt: Receipt) -> None:
        """Write a receipt that will not change."""
        self._fixed.append(receipt)
        self.write()

    def write(self) -> None:
        """Write the receipts that have changed; the log says once if they cannot be written."""
        with self._lock:
            self._turns += 1
            turn = self._turns
            receipts = [Receipt.of(book, point) for book, point in list(self._books)]
            if self._forked:  # most such processes have nothing to tell
                receipts = [one for one in receipts if one.calls or one.fallbacks]
            try:
                for receipt in [*self._fixed, *receipts]:
                    path = self._folder / receipt.file_name
                    if self._written.get(path) != receipt or not path.exists():
                        self._folder.mkdir(parents=True, exist_ok=True)
                        receipt.write(path)
                        self._written[path] = receipt
            except OSError as error:
                if not self._failing:
                    message = "receipts cannot be written to %s, which is tried again: %s"
                    log.error(message, self._folder, error.strerror)
                self._failing = True
            else:
                if self._failing:
                    log.warning("receipts are written to %s again", self._folder)
                self._failing = False
            if self._turns != turn:  # older counts may now lie over those that a handler wrote
                self.write()

    def close(self) -> None:
        """Stop the thread and write a last time; idempotent, and does the rest if interrupted."""
        if not self._closed:
            self._ended.set()
            if self._thread.ident is not None:
                self._thread.join()
            self.write()
            self._closed = True
            atexit.unregister(self.close)
            if self._at_end is not None:
                self._at_end.cancel()
            _WRITERS.discard(self)

    def begin_again(self) -> None:
        """Go on in a process that was forked."""
        if self._ended.is_set():
            self._closed = True  # the rest is the parent's
            return
        for book, _ in self._books:
            book.begin_again()
        self._fixed, self._written, self._forked = [], {}, True
        self._start()

    def _start(self) -> None:
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="patcher-receipts", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more of them, or ends
            log.error("receipts are written only when the process ends: %s", error)
        atexit.register(self.close)

    def _close_in_child(self) -> None:
        """Write at the end of a child of multiprocessing, which skips `atexit`."""
        if not self._ended.is_set():
            self._at_end = multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            self.write()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full volume, a used up quota and a limit of file sizes say."""
_WRITES = itertools.count()
"""Numbers of the files that become receipts."""
_WRITERS: weakref.WeakSet[ReceiptWriter] = weakref.WeakSet()


def _after_fork() -> None:
    _namespace.cache_clear()
    for writer in list(_WRITERS):
        writer.begin_again()


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _namespace() -> str:
    """Tells apart processes of one id: the boot of the kernel, and the namespace of ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        names = os.readlink("/proc/self/ns/pid")
    except OSError:  # not on Linux, where containers have a kernel of their own
        boot, names = str(uuid.getnode()), ""
    return hashlib.sha256(f"{boot} {names}".encode()).hexdigest()[:12]


def read_receipts(folder: Path) -> list[Receipt]:
    """Read every receipt in a folder, sorted by patch, host, rank and process.

    Raises:
        VerificationError: a receipt is damaged.
    """
    found = [Receipt.read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(
        found,
        key=lambda one: (one.patch_id, one.host, -1 if one.rank is None else one.rank, one.pid),
    )


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
