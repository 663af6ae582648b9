"""The patches that are switched on, put into the engine of this process.

An engine's plugin calls `activate` in every process: the one that was started, its engine core,
its workers and those that are started anew. Nothing happens unless `PATCHER_PATCHES` says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import MissingError, PatcherError, UsageError, VerificationError
from integrate.counts import Book, GraphWatch
from integrate.dispatch import AxisGuard, Dispatcher, Guards, TensorGuard
from integrate.manifest import Manifest
from integrate.patch import Patch
from integrate.points import PatchPoint, find_point
from integrate.receipts import Receipt, ReceiptWriter, own_rank
from integrate.store import Store

log = logging.getLogger("patcher")

Kernel = Callable[..., object]


def variable(name: str) -> str:
    """`PATCHER_<name>`, or `TLLM_PATCHER_<name>`: only such names reach TensorRT-LLM's workers."""
    return os.environ.get(f"PATCHER_{name}") or os.environ.get(f"TLLM_PATCHER_{name}") or ""


@dataclass(frozen=True)
class Switches:
    """What the environment says."""

    patches: str
    """`PATCHER_PATCHES`: `on`, ids separated by commas, or `off`, which is the default."""
    strict: bool
    """`PATCHER_STRICT`: what fails raises, instead of leaving the engine as it is."""
    receipts: Path | None
    """`PATCHER_RECEIPTS`: the folder where this process says what ran."""

    @classmethod
    def read(cls) -> Switches:
        folder = variable("RECEIPTS")
        return cls(
            variable("PATCHES").strip() or "off",
            variable("STRICT") not in ("", "0"),
            Path(folder) if folder else None,
        )

    def chosen(self, engine: str, store: Store) -> list[Patch]:
        """The applied patches of an engine that the environment asks for.

        Raises:
            UsageError: one that is asked for by its id is not applied.
            VerificationError: the store is damaged.
        """
        if self.patches == "off":
            return []
        entries = store.applied()
        if self.patches != "on":
            wanted = [name.strip() for name in self.patches.split(",") if name.strip()]
            unknown = sorted(set(wanted) - {entry.id for entry in entries})
            if unknown:
                raise UsageError(
                    f"PATCHER_PATCHES names {unknown[0]}, which is not applied",
                    "see `patcher patches`, or set PATCHER_PATCHES=on",
                )
            entries = tuple(entry for entry in entries if entry.id in wanted)
        return [store.load(entry) for entry in entries if entry.engine == engine]


class Installed:
    """A patch in an engine. A context manager that can be entered again and again.

    While it is entered the patch is in; leaving restores exactly, also after an exception.
    """

    def __init__(self, patch: Patch, point: PatchPoint, dispatcher: Dispatcher) -> None:
        self.patch, self.point, self.dispatcher = patch, point, dispatcher
        self.book = dispatcher.book

    def install(self) -> None:
        self.point.install(self.dispatcher)

    def remove(self) -> None:
        self.point.remove()

    def __enter__(self) -> Book:
        self.install()
        return self.book

    def __exit__(self, *exc: object) -> None:
        self.remove()


def prepare(
    target: Any,
    patch: Patch,
    *,
    kernel: Kernel | None = None,
    book: Book | None = None,
    strict: bool = True,
    watch: GraphWatch | None = None,
) -> Installed:
    """A patch ready for a model or this process: what the bundle says, dispatch and patch point.

    Args:
        target: a built model, or None where the patch point lies in the engine's classes.
        kernel: the patch's kernel; by default it is loaded, or built and loaded.
        book: where calls are counted; a new one by default.

    Raises:
        MissingError: engine, compiler or GPU that it needs is not here.
        VerificationError: the installed engine or the model is not what the patch replaces, or
            the kernel does not build here.
    """
    patch.verify_target()
    manifest = patch.manifest
    point = find_point(manifest.target.engine, manifest.target.point)(target)
    point.find()
    book = book or Book(manifest.id, patch.digest)
    if watch is not None:
        watch.add(book)
    dispatcher = Dispatcher(
        manifest.entry,
        kernel or patch.kernel(),
        guards_of(manifest),
        book,
        strict=strict,
        watch=watch,
    )
    return Installed(patch, point, dispatcher)


def guards_of(manifest: Manifest) -> Guards:
    """What a bundle says of its kernel, as the dispatcher checks it."""
    guards, contract = manifest.guards, manifest.contract
    return Guards(
        device=guards.device,
        tensors=tuple(
            TensorGuard(
                tensor.name,
                tensor.shape,
                tensor.dtype,
                tensor.access != "read",
                rows=tensor.layout == "rows",
                alignment=tensor.alignment,
            )
            for tensor in contract.tensors
        ),
        scalars=tuple(
            (scalar.name, int if scalar.type == "int" else float) for scalar in contract.scalars
        ),
        dtypes=tuple(
            {symbol: getattr(torch, name) for symbol, name in choice.items()}
            for choice in guards.dtypes
        ),
        axes={
            axis: AxisGuard(guard.minimum, guard.maximum, guard.multiple_of)
            for axis, guard in guards.axes.items()
        },
        capabilities=tuple(
            (int(major), int(minor))
            for major, minor in (name.split(".") for name in guards.capabilities)
        ),
        graph_safe=guards.graph_safe,
        solve=contract.axes_of,
    )


@dataclass
class Activation:
    """What is in this process. `close` takes it out; once more is the same as once."""

    engine: str
    installed: list[Installed] = field(default_factory=list)
    failures: dict[str, PatcherError] = field(default_factory=dict)
    """Patches that are not in, by id, and why."""
    watch: GraphWatch = field(default_factory=lambda: GraphWatch([]))
    writer: ReceiptWriter | None = None

    @property
    def digests(self) -> str:
        """The digests of what is in, for whoever keys a cache of compiled code by them."""
        return ",".join(sorted(item.patch.digest for item in self.installed))

    def close(self) -> None:
        for item in reversed(self.installed):
            item.remove()
            item.dispatcher.close()
        self.watch.remove()
        if self.writer is not None:
            self.writer.close()
        self.installed = []

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def activate(
    engine: str,
    target: Any = None,
    *,
    switches: Switches | None = None,
    store: Store | None = None,
    tensor_parallel: int = 1,
) -> Activation:
    """Put in what is switched on for this engine; see `Switches` for what says so.

    In serving, a patch that cannot be put in is told once, in the log and in its receipt, and the
    engine is unharmed.

    Args:
        target: a built model, for engines whose patch points lie in one.
        tensor_parallel: how many workers share a layer.

    Raises:
        PatcherError: when measuring (`PATCHER_STRICT`), whatever kept a patch out.
    """
    switches = switches or Switches.read()
    active = Activation(engine)
    if switches.patches == "off":
        return active
    try:
        if switches.receipts is not None:
            active.writer = ReceiptWriter(switches.receipts)
        patches = switches.chosen(engine, store or Store(_home()))
    except PatcherError as error:
        active.close()
        if switches.strict:
            raise
        log.error("no patch is in, the engine's own kernels run: %s", error)
        return active
    for patch in patches:
        try:
            _fit(patch, tensor_parallel)
            item = prepare(target, patch, strict=switches.strict, watch=active.watch)
            item.install()
        except PatcherError as error:
            _refused(active, patch, error)
            if switches.strict:
                active.close()
                raise
        else:
            active.installed.append(item)
            if active.writer is not None:
                active.writer.add(item.book, _where(patch))
    if active.installed and torch.cuda.is_available():
        active.watch.install()
    return active


def _home() -> Path | None:
    home = variable("HOME")
    return Path(home) if home else None


def _fit(patch: Patch, tensor_parallel: int) -> None:
    guards = patch.manifest.guards
    if guards.tensor_parallel and tensor_parallel not in guards.tensor_parallel:
        sizes = ", ".join(map(str, guards.tensor_parallel))
        raise VerificationError(
            f"{patch.manifest.id} is for a tensor parallel size of {sizes}, not {tensor_parallel}",
            "serve with that size, or revert the patch",
        )
    if guards.device != "cuda" or not guards.capabilities:
        return
    if not torch.cuda.is_available():
        raise MissingError(f"{patch.manifest.id} is for a GPU, and none is here", "revert it here")
    found = "{}.{}".format(*torch.cuda.get_device_capability())
    if found not in guards.capabilities:
        known = ", ".join(guards.capabilities)
        raise VerificationError(
            f"{patch.manifest.id} was judged on compute capability {known}, this GPU has {found}",
            "judge it on this GPU (`patcher bundle`)",
        )


def _refused(active: Activation, patch: Patch, error: PatcherError) -> None:
    active.failures[patch.manifest.id] = error
    log.error("%s is not in, the engine's own runs: %s", patch.manifest.id, error)
    if active.writer is not None:
        active.writer.put(
            Receipt(
                patch_id=patch.manifest.id,
                digest=patch.digest,
                pid=os.getpid(),
                rank=own_rank(),
                point=_where(patch),
                failure=str(error),
            )
        )


def _where(patch: Patch) -> str:
    return f"{patch.manifest.target.engine}:{patch.manifest.target.point}"


__all__: Sequence[str] = (
    "Activation",
    "Installed",
    "Switches",
    "activate",
    "guards_of",
    "prepare",
)
