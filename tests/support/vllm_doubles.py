"""Doubles of packages that vLLM's modules import but patch points do not use.

vLLM is read and run on a CPU from its unpacked wheel. Packages that need a compiler or a GPU, or
that only serve HTTP, are not installed there. As a pytest plugin (`-p vllm_doubles`) this module
lets them be imported: each is an empty module whose attributes are empty classes. A package that is
installed is never replaced, and no other name can be imported that could not be before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DOUBLED = frozenset(
    (
        "compressed_tensors",
        "fastsafetensors",
        "instanttensor",
        "llguidance",
        "lmformatenforcer",
        "mcp",
        "model_hosting_container_standards",
        "openai_harmony",
        "outlines_core",
        "prometheus_fastapi_instrumentator",
        "uvicorn",
        "uvloop",
        "watchfiles",
        "xgrammar",
    )
)


class _Double(type):
    """The type of doubled classes: any attribute is another double, as `Role.USER` is."""

    def __getattr__(cls, name: str) -> Any:
        return _double(name, cls.__module__)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


def _double(name: str, module: str) -> Any:
    if name.startswith("__"):  # what Python and its libraries probe for
        raise AttributeError(name)
    return _Double(name, (), {"__module__": module, "__get_pydantic_core_schema__": _any_schema})


@classmethod  # type: ignore[misc]
def _any_schema(cls: Any, *given: Any) -> Any:
    """Let a pydantic model have a field of a doubled type."""
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _DoubleModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        made = _double(name, self.__name__)
        setattr(self, name, made)
        return made


class Finder:
    """The last finder: asked for what no other one has."""

    def __init__(self, doubled: frozenset[str]) -> None:
        self.doubled = doubled

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.doubled:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DoubleModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder(DOUBLED))  # type: ignore[arg-type]
