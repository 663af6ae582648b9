"""How does a kernel get into an engine and out again? Patch bundles, dispatch, receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from integrate.manifest import Manifest
from integrate.patch import Patch
from integrate.receipts import Receipt, read_receipts
from integrate.store import Applied, Store

if TYPE_CHECKING:
    from integrate.activation import Activation, Switches, activate, prepare
    from integrate.counts import Book

_LAZY = {
    "Activation": "integrate.activation",
    "Book": "integrate.counts",
    "Switches": "integrate.activation",
    "activate": "integrate.activation",
    "prepare": "integrate.activation",
}


def __getattr__(name: str) -> Any:
    """torch is imported only by those who patch."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Activation",
    "Applied",
    "Book",
    "Manifest",
    "Patch",
    "Receipt",
    "Store",
    "Switches",
    "activate",
    "prepare",
    "read_receipts",
]
