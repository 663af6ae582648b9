"""Load a build as a callable, in a process that may run the candidate."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from typing import Any


def load(path: str, binding: str, entry: str) -> Callable[..., Any]:
    """Load the entry function, which takes tensors and scalars in the contract's order.

    This runs the file's initialisers.

    Args:
        path: file of the build.
        binding: `tvm-ffi`, `torch` (pybind11) or `python`.
        entry: name of the entry function.
    """
    if binding == "tvm-ffi":
        import tvm_ffi

        function: Callable[..., Any] = getattr(tvm_ffi.load_module(path), entry)
        return function
    import torch  # noqa: F401  (its libraries must be loaded first)

    loader = None
    if binding == "torch":
        loader = importlib.machinery.ExtensionFileLoader("candidate", path)
    spec = importlib.util.spec_from_file_location("candidate", path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bound: Callable[..., Any] = getattr(module, entry)
    return bound
