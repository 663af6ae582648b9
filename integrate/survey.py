"""Which layers of a loaded model each installed patch takes, and what that means.

A point decides by the layer's class and settings. The guards decide by the layer's own tensors: a
weight of another dtype or size would make every call fall back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from patcher.bench import VerificationError
from patcher.integrate.activation import Installed
from patcher.integrate.guards import CallGuards
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.receipts import Receipt

log = logging.getLogger("patcher")


@runtime_checkable
class LayerPoint(Protocol):
    """A patch point of a layer's role, which knows the layers of a loaded model."""

    def of_role(self, layer: Any) -> bool:
        """Whether a module of a loaded model is a layer of this point's role."""
        ...

    def applies(self, layer: Any) -> str | None:
        """Why a layer of the role keeps the engine's own code; None if the patch takes it."""
        ...

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """The layer's own tensors that every call passes, by their names in the contract."""
        ...


def look(items: Iterable[Installed], layers: Iterable[Any], number: int, strict: bool) -> None:
    """Count the layers that each patch takes, in its counters.

    Args:
        items: the installed patches; points of other packages need not know layers.
        layers: the modules of the models of one worker.
        number: the number of that worker in this process.
        strict: whether a patch that no layer takes is an error.

    Raises:
        VerificationError: see `must_take_some`.
    """
    kept, modules = list(items), list(layers)
    for item in kept:
        if isinstance(item.point, LayerPoint):
            item.book.surveys[number] = survey(item.point, item.dispatcher.guards, modules)
    must_take_some(kept, strict)


def survey(point: LayerPoint, guards: CallGuards, layers: Iterable[Any]) -> LayerSurvey:
    """Count the layers of a point's role.

    Args:
        point: the patch point.
        guards: the guards of the patch's kernel.
        layers: the modules of the models; each counts once.
    """
    taken, refused = 0, Counter[str]()
    for layer in dict.fromkeys(layers):
        if point.of_role(layer):
            reason = point.applies(layer) or guards.refusal_for_good(point.constants(layer))
            if reason is None:
                taken += 1
            else:
                refused[reason] += 1
    return LayerSurvey(taken, refused)


def must_take_some(items: Iterable[Installed], strict: bool) -> None:
    """Warn of patches that every layer of their role refused.

    Raises:
        VerificationError: there is one, and `strict` is set.
    """
    for item in items:
        layers = item.book.layers
        if layers is not None and layers.total and not layers.taken:
            _warn(f"{item.patch.manifest.id} has no effect: no layer takes it ({layers})", strict)


def report(
    items: Iterable[Installed], strict: bool, shown: logging.Logger = log, *, ran: bool = True
) -> None:
    """Log what each patch took until the end of warm-up, and warn of those that did nothing.

    A patch whose calls all fell back is a warning only, since later calls may have other sizes;
    what was compiled without it stays so.

    Args:
        items: the installed patches.
        strict: whether a patch without effect is an error.
        shown: the logger for what the patches took; one whose lines the engine shows.
        ran: whether the model ran until now; else no patch can have had a call.

    Raises:
        VerificationError: a patch was never reached, and `strict` is set.
    """
    kept = list(items)
    if lines := list(_lines(kept)):
        shown.info("patched layers: %s", "; ".join(lines))
    for item in kept if ran else ():
        if item.book.ran:
            continue
        receipt = Receipt.of(item.book).model_copy(update={"calls": {}})  # of engines before
        why = ", ".join(f"{count:,}: {reason}" for reason, count in receipt.fallbacks.items())
        said = f"{item.patch.manifest.id} has no effect after warm-up: {receipt.idle}"
        later = receipt.fallbacks.keys() - item.book.compiled_out.keys()
        _warn(f"{said} ({why})" if why else said, strict and not later)


def _lines(items: Iterable[Installed]) -> Iterator[str]:
    for item in items:
        if (layers := item.book.layers) is not None:
            yield f"{item.patch.manifest.target.point}: {layers}"


def _warn(message: str, strict: bool) -> None:
    if strict:
        raise VerificationError(message, "leave the patch out, or unset PATCHER_STRICT")
    log.warning("%s", message)
