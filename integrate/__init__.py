"""How does a kernel get into an engine and out again? Patch bundles, dispatch, receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from integrate.patch import Manifest, Patch
from integrate.receipts import Receipt
from integrate.store import Applied, Store

if TYPE_CHECKING:
    from integrate.dispatch import ReceiptBook
    from integrate.export import export_patch
    from integrate.imports import import_kernel
    from integrate.install import prepare

_LAZY = {
    "ReceiptBook": "integrate.dispatch",
    "export_patch": "integrate.export",
    "import_kernel": "integrate.imports",
    "prepare": "integrate.install",
}


def __getattr__(name: str) -> Any:
    """torch is imported only by those who patch; formats only by those who export and import."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Applied",
    "Manifest",
    "Patch",
    "Receipt",
    "ReceiptBook",
    "Store",
    "export_patch",
    "import_kernel",
    "prepare",
]
