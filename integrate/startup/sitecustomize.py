"""Runs at the start of Python in every process of `python -m patcher.integrate`.

It imports only the standard library. If `PATCHER_PATCHES` is set, the enabled patches are installed
when transformers' gpt-oss is imported, for every model built afterwards. If another `sitecustomize`
follows on the path, that one runs too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_MODULE = "transformers.models.gpt_oss.modeling_gpt_oss"
"""The module that holds all patch points of transformers."""
_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport:
    """Finds that module as Python would, and activates patches after its execution."""

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
    except Exception as error:  # the program runs without patches
        import logging  # imported here to keep the start of every process fast

        logging.getLogger("patcher").error(
            "no patch is installed, the engine's own kernels run: %s cannot import patcher (%s)",
            sys.executable,
            error,
        )
        return None
    return activate("transformers")


def _run_next_sitecustomize() -> None:
    elsewhere = [place for place in sys.path if os.path.abspath(place) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if any(
    os.environ.get(f"{prefix}PATCHER_PATCHES", "") not in ("", "off") for prefix in ("", "TLLM_")
):
    sys.meta_path.insert(0, _AfterImport())
_run_next_sitecustomize()
