"""The patches that are switched on, put into the engine of this process.

An engine's plugin calls `activate` in every process: the one that was started, its engine core,
its workers and those that are started anew. Nothing happens unless `PATCHER_PATCHES` says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from patcher.bench import DTYPES, Contract, PatcherError
from patcher.integrate.counts import CallCounters, GraphWatch
from patcher.integrate.dispatch import AxisBounds, CallGuards, Dispatcher, TensorGuard
from patcher.integrate.manifest import Manifest
from patcher.integrate.patch import Patch
from patcher.integrate.points import PatchPoint, find_point
from patcher.integrate.receipts import Receipt, ReceiptWriter, own_rank
from patcher.integrate.store import Applied, Store
from patcher.integrate.switches import Switches, home_store, variable
from patcher.integrate.verify import verify_device, verify_workers

log = logging.getLogger("patcher")

Kernel = Callable[..., object]


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

    def __enter__(self) -> CallCounters:
        self.install()
        return self.book

    def __exit__(self, *exc: object) -> None:
        self.remove()


def prepare(
    target: Any,
    patch: Patch,
    *,
    kernel: Kernel | None = None,
    book: CallCounters | None = None,
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
    book = book or CallCounters(manifest.id, patch.digest)
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


def guards_of(manifest: Manifest) -> CallGuards:
    """What a bundle says of its kernel, as the dispatcher checks it."""
    guards = manifest.guards
    return replace(
        contract_guards(manifest.contract, guards.device, guards.dtypes),
        axes={
            axis: AxisBounds(guard.minimum, guard.maximum, guard.multiple_of)
            for axis, guard in guards.axes.items()
        },
        capabilities=tuple(
            (int(major), int(minor))
            for major, minor in (name.split(".") for name in guards.capabilities)
        ),
        graph_safe=guards.graph_safe,
    )


def contract_guards(
    contract: Contract, device: str, dtypes: Iterable[Mapping[str, str]]
) -> CallGuards:
    """What a contract says of a call on a device.

    Args:
        dtypes: combinations by symbol, torch's names.
    """
    return CallGuards(
        device=device,
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
            {symbol: DTYPES[name].torch_dtype for symbol, name in choice.items()}
            for choice in dtypes
        ),
        solve=contract.axes_of,
    )


@dataclass
class Activation:
    """What is in this process. `close` takes it out; once more is the same as once."""

    engine: str
    installed: list[Installed] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)
    """Patches that are not in, by id, and why."""
    watch: GraphWatch = field(default_factory=lambda: GraphWatch([]))
    writer: ReceiptWriter | None = None

    @property
    def digests(self) -> str:
        """The digests of what is in, for whoever keys a cache of compiled code by them."""
        return ",".join(sorted(item.patch.digest for item in self.installed))

    def close(self) -> None:
        """Take everything out, also what comes after a patch that cannot be.

        Raises:
            VerificationError: someone else patched over one; theirs stays.
        """
        installed, self.installed = self.installed, []
        covered: list[PatcherError] = []
        for item in reversed(installed):
            try:
                item.remove()
            except PatcherError as error:
                covered.append(error)
            item.dispatcher.close()
        self.watch.remove()
        if self.writer is not None:
            self.writer.close()
        if covered:
            raise covered[0]

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
        store = store or home_store()
        entries = switches.chosen(engine, store)
    except PatcherError as error:
        active.close()
        if switches.strict:
            raise
        log.error("no patch is in, the engine's own kernels run: %s", error)
        return active
    for entry in entries:
        item: Installed | None = None
        try:
            patch = store.load(entry)
            verify_workers(patch.manifest, tensor_parallel)
            verify_device(patch.manifest)
            item = prepare(target, patch, strict=switches.strict, watch=active.watch)
            item.install()
        except Exception as error:  # whatever it is, requests are served without the patch
            if item is not None:
                item.remove()
            _refused(active, entry, error)
            if switches.strict:
                active.close()
                raise
        else:
            active.installed.append(item)
            if active.writer is not None:
                active.writer.add(item.book, _where(entry))
    if active.installed and torch.cuda.is_available():
        active.watch.install()
    return active


def _refused(active: Activation, entry: Applied, error: Exception) -> None:
    known = isinstance(error, PatcherError)
    why = str(error) if known else f"{type(error).__name__}: {error}"
    active.failures[entry.id] = error
    log.error("%s is not in, the engine's own runs: %s", entry.id, why, exc_info=not known)
    if active.writer is not None:
        active.writer.put(
            Receipt(
                patch_id=entry.id,
                digest=entry.digest,
                pid=os.getpid(),
                rank=own_rank(),
                point=_where(entry),
                failure=why,
            )
        )


def _where(entry: Applied) -> str:
    return f"{entry.engine}:{entry.point}"


__all__: Sequence[str] = (
    "Activation",
    "Installed",
    "Switches",
    "activate",
    "contract_guards",
    "guards_of",
    "prepare",
    "variable",
)
