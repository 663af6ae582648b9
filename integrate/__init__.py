"""How does a kernel get into an engine and out again? Patch bundles, dispatch, receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from integrate.archive import is_archive, pack, unpacked
from integrate.changes import Change
from integrate.manifest import Manifest
from integrate.patch import Patch
from integrate.receipts import Receipt, read_receipts
from integrate.store import Applied, Store
from integrate.switches import Switches, home_store, starting_up, switching_on
from integrate.verify import Check, Verified, verify

if TYPE_CHECKING:
    from integrate.activation import Activation, activate, prepare
    from integrate.counts import Book
    from integrate.export import export_patch
    from integrate.imports import import_kernel
    from integrate.measuring import activated, await_engine
    from integrate.points import engine_wants
    from integrate.tensorrt_llm import check_workers, write_module
    from integrate.tensorrt_llm_recipe import write_recipe
    from integrate.tensorrt_llm_source import SEAMS, make_diff

_LAZY = {
    "SEAMS": "integrate.tensorrt_llm_source",
    "check_workers": "integrate.tensorrt_llm",
    "make_diff": "integrate.tensorrt_llm_source",
    "write_module": "integrate.tensorrt_llm",
    "write_recipe": "integrate.tensorrt_llm_recipe",
    "Activation": "integrate.activation",
    "Book": "integrate.counts",
    "activate": "integrate.activation",
    "activated": "integrate.measuring",
    "await_engine": "integrate.measuring",
    "engine_wants": "integrate.points",
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
    "SEAMS",
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
    "check_workers",
    "engine_wants",
    "export_patch",
    "home_store",
    "import_kernel",
    "is_archive",
    "make_diff",
    "pack",
    "prepare",
    "read_receipts",
    "starting_up",
    "switching_on",
    "unpacked",
    "verify",
    "write_module",
    "write_recipe",
]
