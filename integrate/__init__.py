"""How does a kernel get into an engine and out again? Patch bundles, dispatch, receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patcher.integrate.archive import is_archive, pack, require_target, unpacked
from patcher.integrate.bundle import open_bundle
from patcher.integrate.changes import Change
from patcher.integrate.engine import engine_version, must_fit_model, patch_point
from patcher.integrate.manifest import Manifest
from patcher.integrate.patch import Patch
from patcher.integrate.places import OpPlaces, of_model, places_of
from patcher.integrate.receipts import Receipt, idle_patches, read_receipts
from patcher.integrate.store import Applied, Store
from patcher.integrate.switches import Switches, home_store, patch_environment, startup_python_path
from patcher.integrate.verify import FitCheck, FitReport, verify

if TYPE_CHECKING:
    from patcher.integrate.activation import Activation, activate, prepare
    from patcher.integrate.counts import CallCounters, GraphWatch
    from patcher.integrate.export import export_patch
    from patcher.integrate.formats.foreign_contract import Refused
    from patcher.integrate.imports import import_kernel, import_model_new
    from patcher.integrate.kernelbench.imports import (
        ProblemOptions,
        import_problems,
        own_problem_op,
        problem_files,
        sizes_of,
    )
    from patcher.integrate.kernelbench.model_new import write_model_new
    from patcher.integrate.kernelbench.sol_solution import write_solution
    from patcher.integrate.measuring import activated, await_engine, worker_receipts
    from patcher.integrate.points import all_specs, engine_wants, names_taken, specs_of
    from patcher.integrate.recorders import recorder
    from patcher.integrate.recording import Recorder, RecordingLimits
    from patcher.integrate.tensorrt_llm import check_workers, write_module
    from patcher.integrate.tensorrt_llm_recipe import write_recipe
    from patcher.integrate.tensorrt_llm_source import SEAMS, make_diff

_LAZY = {
    "SEAMS": "patcher.integrate.tensorrt_llm_source",
    "check_workers": "patcher.integrate.tensorrt_llm",
    "make_diff": "patcher.integrate.tensorrt_llm_source",
    "write_module": "patcher.integrate.tensorrt_llm",
    "write_recipe": "patcher.integrate.tensorrt_llm_recipe",
    "all_specs": "patcher.integrate.points",
    "Activation": "patcher.integrate.activation",
    "CallCounters": "patcher.integrate.counts",
    "GraphWatch": "patcher.integrate.counts",
    "activate": "patcher.integrate.activation",
    "activated": "patcher.integrate.measuring",
    "await_engine": "patcher.integrate.measuring",
    "worker_receipts": "patcher.integrate.measuring",
    "engine_wants": "patcher.integrate.points",
    "export_patch": "patcher.integrate.export",
    "import_kernel": "patcher.integrate.imports",
    "import_model_new": "patcher.integrate.imports",
    "ProblemOptions": "patcher.integrate.kernelbench.imports",
    "Refused": "patcher.integrate.formats.foreign_contract",
    "import_problems": "patcher.integrate.kernelbench.imports",
    "own_problem_op": "patcher.integrate.kernelbench.imports",
    "problem_files": "patcher.integrate.kernelbench.imports",
    "sizes_of": "patcher.integrate.kernelbench.imports",
    "write_model_new": "patcher.integrate.kernelbench.model_new",
    "write_solution": "patcher.integrate.kernelbench.sol_solution",
    "prepare": "patcher.integrate.activation",
    "Recorder": "patcher.integrate.recording",
    "RecordingLimits": "patcher.integrate.recording",
    "recorder": "patcher.integrate.recorders",
    "names_taken": "patcher.integrate.points",
    "specs_of": "patcher.integrate.points",
}


def __getattr__(name: str) -> Any:
    """Import torch only for patching, and formats only for export and import."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "SEAMS",
    "Activation",
    "Applied",
    "CallCounters",
    "Change",
    "FitCheck",
    "FitReport",
    "GraphWatch",
    "Manifest",
    "OpPlaces",
    "Patch",
    "ProblemOptions",
    "Receipt",
    "Recorder",
    "RecordingLimits",
    "Refused",
    "Store",
    "Switches",
    "activate",
    "activated",
    "all_specs",
    "await_engine",
    "check_workers",
    "engine_version",
    "engine_wants",
    "export_patch",
    "home_store",
    "idle_patches",
    "import_kernel",
    "import_model_new",
    "import_problems",
    "is_archive",
    "make_diff",
    "must_fit_model",
    "names_taken",
    "of_model",
    "open_bundle",
    "own_problem_op",
    "pack",
    "patch_environment",
    "patch_point",
    "places_of",
    "prepare",
    "problem_files",
    "read_receipts",
    "recorder",
    "require_target",
    "sizes_of",
    "specs_of",
    "startup_python_path",
    "unpacked",
    "verify",
    "worker_receipts",
    "write_model_new",
    "write_module",
    "write_recipe",
    "write_solution",
]
