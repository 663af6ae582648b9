"""Runs when Python starts, in every process of `python -m patcher.integrate`.

Imports nothing but the standard library, and does nothing until transformers' gpt-oss is imported
and `PATCHER_PATCHES` is set: then the patches that are on go into every model built from then on.
It stands before another `sitecustomize` on the path, and runs that one too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_MODULE = "transformers.models.gpt_oss.modeling_gpt_oss"
"""What all patch points of transformers lie in: what it needs is imported by then."""
_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport:
    """Finds that module as Python would, and activates once it has been executed."""

    activation: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_activate(module: ModuleType) -> None:
                execute(module)
                self.activation = _activate()

            spec.loader.exec_module = execute_and_activate  # type: ignore[method-assign]
        return spec


def _activate() -> Any:
    if importlib.util.find_spec("patcher") is None:
        sys.path.append(_HERE.rsplit(os.sep, 3)[0])  # a checkout
    try:
        from patcher.integrate import activate
    except ImportError as error:
        import logging  # not at the start of every process

        logging.getLogger("patcher").error(
            "no patch is in, the engine's own kernels run: patcher cannot be imported by %s (%s)",
            sys.executable,
            error,
        )
        return None
    return activate("transformers")


def _run_the_one_behind() -> None:
    elsewhere = [place for place in sys.path if os.path.abspath(place) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if any(
    os.environ.get(f"{prefix}PATCHER_PATCHES", "") not in ("", "off") for prefix in ("", "TLLM_")
):
    sys.meta_path.insert(0, _AfterImport())
_run_the_one_behind()
