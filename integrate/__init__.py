"""How does a kernel get into an engine and out again? Patch bundles, dispatch, receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from integrate.archive import is_archive, pack, unpacked
from integrate.changes import Change
from integrate.manifest import Manifest
from integrate.patch import Patch
from integrate.receipts import Receipt, read_receipts
from integrate.store import Applied, Store
from integrate.switches import Switches, home_store
from integrate.verify import Check, Verified, verify

if TYPE_CHECKING:
    from integrate.activation import Activation, activate, prepare
    from integrate.counts import Book
    from integrate.export import export_patch
    from integrate.imports import import_kernel
    from integrate.measuring import activated, await_engine

_LAZY = {
    "Activation": "integrate.activation",
    "Book": "integrate.counts",
    "activate": "integrate.activation",
    "activated": "integrate.measuring",
    "await_engine": "integrate.measuring",
    "export_patch": "integrate.export",
    "import_kernel": "integrate.imports",
    "prepare": "integrate.activation",
}


def __getattr__(name: str) -> Any:
    """torch is imported only by those who patch; formats only by those who export and import."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Activation",
    "Applied",
    "Book",
    "Change",
    "Check",
    "Manifest",
    "Patch",
    "Receipt",
    "Store",
    "Switches",
    "Verified",
    "activate",
    "activated",
    "await_engine",
    "export_patch",
    "home_store",
    "import_kernel",
    "is_archive",
    "pack",
    "prepare",
    "read_receipts",
    "unpacked",
    "verify",
]
