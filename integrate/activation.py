"""Install the enabled patches in the engine of this process.

An engine's plugin calls `activate` in every process: the main process, the engine core, and
workers, including restarted ones. Without `PATCHER_PATCHES` it does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from patcher.bench import DTYPES, AxisGuard, Contract, PatcherError
from patcher.integrate.changes import SourceChangedError
from patcher.integrate.counts import CallCounters, GraphWatch
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds, CallGuards, TensorGuard
from patcher.integrate.manifest import Manifest, PatchGuards
from patcher.integrate.patch import Patch
from patcher.integrate.points import PatchPoint, find_point
from patcher.integrate.receipts import Receipt, ReceiptWriter
from patcher.integrate.store import Applied, Store
from patcher.integrate.switches import Switches, home_store, variable
from patcher.integrate.verify import verify_device, verify_workers

log = logging.getLogger("patcher")

Kernel = Callable[..., object]


class Installed:
    """A patch, its patch point and its dispatcher. A reentrant context manager.

    Entering installs the patch; leaving restores the engine exactly, also after an exception.
    """

    def __init__(self, patch: Patch, point: PatchPoint, dispatcher: Dispatcher) -> None:
        self.patch, self.point, self.dispatcher = patch, point, dispatcher
        self.book = dispatcher.book

    def install(self) -> None:
        """Install the patch; see `PatchPoint.install`."""
        self.point.install(self.dispatcher)

    def remove(self) -> None:
        """Restore the engine; see `PatchPoint.remove`."""
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
    """Prepare a patch for a model or this process; it is not installed yet.

    Args:
        target: a built model, or None if the patch point lies in the engine's classes.
        patch: the bundle.
        kernel: the patch's kernel; by default the bundle's binary, or one built from its source.
        book: the call counters; new ones by default.
        strict: whether a kernel that raises is an error; see `Dispatcher`.
        watch: watches CUDA graphs to count calls in their replays.

    Returns:
        The patch with its patch point and dispatcher.

    Raises:
        MissingError: the engine, the compiler or the GPU that it needs is missing.
        VerificationError: the installed engine or the model is not what the patch replaces, or
            the kernel does not build.
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
    """The guards of a bundle, as the dispatcher checks them."""
    return call_guards(manifest.contract, manifest.guards)


def call_guards(contract: Contract, guards: PatchGuards) -> CallGuards:
    """The guards of a patch of an op with this contract, as the dispatcher checks them."""
    return replace(
        contract_guards(contract, guards.device, guards.dtypes),
        axes={axis: _bounds(guard) for axis, guard in guards.axes.items()},
        shapes=tuple((one.sizes, one.axis, _bounds(one.guard)) for one in guards.shapes),
        capabilities=tuple(
            (int(major), int(minor))
            for major, minor in (name.split(".") for name in guards.capabilities)
        ),
        graph_safe=guards.graph_safe,
    )


def _bounds(guard: AxisGuard) -> AxisBounds:
    return AxisBounds(guard.minimum, guard.maximum, guard.multiple_of)


def contract_guards(
    contract: Contract, device: str, dtypes: Iterable[Mapping[str, str]]
) -> CallGuards:
    """The guards that a contract implies for calls on a device.

    Args:
        contract: the op's contract.
        device: `cpu` or `cuda`.
        dtypes: allowed combinations: the name of a torch dtype by the contract's symbol.
    """
    return CallGuards(
        device=device,
        tensors=tuple(
            TensorGuard(
                tensor.name,
                tensor.shape,
                tensor.dtype,
                tensor.access != "read",
                layout=tensor.layout,
                alignment=tensor.alignment,
                in_part=tensor.in_part,
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
    """The patches installed in this process. `close` removes them and is idempotent."""

    engine: str
    """The engine's name."""
    installed: list[Installed] = field(default_factory=list)
    """The installed patches, in order of installation."""
    failures: dict[str, Exception] = field(default_factory=dict)
    """Why a patch could not be installed, by its id."""
    watch: GraphWatch = field(default_factory=lambda: GraphWatch([]))
    """Counts calls in replays of CUDA graphs."""
    writer: ReceiptWriter | None = None
    """Writes receipts; None if no folder is set."""

    @property
    def digests(self) -> str:
        """Sorted digests of the installed patches, joined by commas: a key for compiled code."""
        return ",".join(sorted(item.patch.digest for item in self.installed))

    def close(self) -> None:
        """Remove all patches, even if one of them cannot be removed.

        Raises:
            VerificationError: another patch was installed over one of these; it stays.
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
    """Install the patches that are enabled for this engine; see `Switches`.

    In serving, a patch that cannot be installed is reported once, in the log and in its receipt,
    and the engine runs unchanged.

    Args:
        engine: the engine's name.
        target: a built model, for engines whose patch points lie in the model.
        switches: which patches are enabled; by default those of the environment.
        store: the store of applied patches; by default the user's.
        tensor_parallel: the number of workers that share a layer.

    Returns:
        The installed patches and the failures.

    Raises:
        PatcherError: with `PATCHER_STRICT`, the reason why a patch was not installed.
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
    except Exception as error:  # on any error, requests are served without patches
        active.close()
        if switches.strict:
            raise
        message = "no patch is installed, the engine's own kernels run: %s%s"
        known = isinstance(error, PatcherError)
        log.error(message, error, _next_step(error), exc_info=not known)
        return active
    if not entries:
        message = "no patch runs here: PATCHER_PATCHES=%s, but none for %s is applied in %s"
        log.warning(message, switches.patches, engine, store.root)
    for entry in entries:
        item: Installed | None = None
        try:
            patch = store.load(entry)
            verify_workers(patch.manifest, tensor_parallel)
            verify_device(patch.manifest)
            item = prepare(target, patch, strict=switches.strict, watch=active.watch)
            item.install()
        except Exception as error:  # on any error, requests are served without the patch
            if item is not None:
                item.remove()
            _report_failure(active, entry, error)
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


def _report_failure(active: Activation, entry: Applied, error: Exception) -> None:
    known = isinstance(error, PatcherError)
    why = str(error) if known else f"{type(error).__name__}: {error}"
    active.failures[entry.id] = error
    message = "%s is not installed, the engine's own kernel runs: %s%s"
    log.error(message, entry.id, why, _next_step(error), exc_info=not known)
    for change in error.changes if isinstance(error, SourceChangedError) else ():
        if change.diff:
            log.error("%s", change.diff)
    if active.writer is not None:
        unused = CallCounters(entry.id, entry.digest)
        receipt = Receipt.of(unused, _where(entry))
        active.writer.put(receipt.model_copy(update={"failure": why}))


def _next_step(error: Exception) -> str:
    return f"; {error.hint}" if isinstance(error, PatcherError) and error.hint else ""


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
