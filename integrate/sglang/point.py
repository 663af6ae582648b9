"""The common part of SGLang's patch points: one attribute that is replaced, and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import Fingerprint
from patcher.integrate.sglang import engine, sources
from patcher.integrate.swap import AttributePatch, remove_all


class SglangPoint(ABC):
    """A patch point at one method; see `patcher.integrate.points.PatchPoint`.

    SGLang calls the method eagerly, and again while it records a CUDA graph, so it is replaced by a
    plain function and needs no operator. A layer keeps the bound method that it called first
    (`BaseFusedOp._forward_method`). So the replacement calls the original once it was removed.
    Recorded graphs keep their kernels until the process ends.
    """

    engine: ClassVar[str] = "sglang"
    name: ClassVar[str]
    op: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """The code that it replaces or relies on, as `module:attribute`."""
    wants: ClassVar[Mapping[str, Any]] = {}
    """Arguments of `ServerArgs` that make SGLang run the patched code."""
    module: ClassVar[str]
    owner: ClassVar[str]
    """The class of the method, in that module."""
    method: ClassVar[str]

    def __init__(self, target: Any = None) -> None:
        """Prepare the point; `target` is unused, since classes are patched."""
        self._swaps: list[AttributePatch] = []
        """The installed replacements."""

    @classmethod
    def fingerprint(cls) -> Fingerprint:
        return sources.RECORD.fingerprint(cls.parts)

    def find(self) -> str:
        sources.RECORD.must_be_as_read(self.name, self.parts)
        AttributePatch(self._class(), self.method).must_be_the_engines()
        engine.must_call_layers()
        return f"{self.module}.{self.owner}.{self.method}"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        swap = AttributePatch(self._class(), self.method)
        original, ours = swap.original, self._replacement(kernel, swap.original)

        def method(*args: Any, **more: Any) -> Any:
            return (ours if self._swaps else original)(*args, **more)

        swap.install(method)
        self._swaps = [swap]

    def remove(self) -> None:
        swaps, self._swaps = self._swaps, []
        remove_all(swaps)

    @abstractmethod
    def of_role(self, layer: Any) -> bool:
        """Whether a module of a loaded model is a layer of this point's role."""

    @abstractmethod
    def applies(self, layer: Any) -> str | None:
        """Why a layer of the role keeps the engine's own code; None if the patch takes it."""

    @abstractmethod
    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """The layer's own tensors that every call passes, by their names in the contract."""

    @abstractmethod
    def _replacement(self, kernel: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of the method."""

    def _class(self) -> Any:
        return getattr(sources.module(self.module), self.owner)
