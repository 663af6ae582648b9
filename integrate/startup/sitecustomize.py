"""Runs at the start of Python in every process of `python -m patcher.integrate`.

It imports only the standard library. If `PATCHER_PATCHES` is set, the enabled patches are installed
when transformers' gpt-oss is imported, for every model built afterwards. Patches that need a built
model are refused when any model is imported. If another `sitecustomize` follows on the path, that
one runs too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_ANY_MODEL = "transformers.modeling_utils"
"""The module that every model of transformers needs."""
_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss"
"""The module that holds the patch points which need no built model."""
_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport:
    """Finds these modules as Python would, and activates patches after their execution."""

    def __init__(self) -> None:
        self.activations: list[Any] = []
        self._waiting = {_ANY_MODEL, _GPT_OSS}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting:
            return None
        self._waiting.remove(name)
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_activate(module: ModuleType) -> None:
                execute(module)
                self.activations.append(_activate(name == _ANY_MODEL))

            spec.loader.exec_module = execute_and_activate  # type: ignore[method-assign]
        return spec


def _activate(of_any_model: bool) -> Any:
    if importlib.util.find_spec("patcher") is None:
        sys.path.append(_HERE.rsplit(os.sep, 3)[0])  # a checkout
    try:
        from patcher.integrate.transformers.startup import activate_after_import
    except Exception as error:  # the program runs without patches
        import logging  # imported here to keep the start of every process fast

        if of_any_model:
            logging.getLogger("patcher").error(
                "no patch is installed, the engine's own kernels run: "
                "%s cannot import patcher (%s)",
                sys.executable,
                error,
            )
        return None
    return activate_after_import(of_any_model)


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
