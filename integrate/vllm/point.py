"""The common part of vLLM's patch points: names, fingerprints and restoring functions."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import Fingerprint
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import passes_on
from patcher.integrate.vllm.swap import AttributePatch, SharedPatch, remove_all

log = logging.getLogger("patcher")


class VllmPoint(ABC):
    """A patch point; see `patcher.integrate.points.PatchPoint` for the methods."""

    engine: ClassVar[str] = "vllm"
    name: ClassVar[str]
    op: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """The code that it replaces or relies on, as `module:attribute`."""
    wants: ClassVar[Mapping[str, str]] = {}
    """Arguments of `LLM` that make vLLM run the patched code."""
    fusions: ClassVar[tuple[str, ...]] = ()
    """The compiler's passes that would fuse what it replaces, by their names in `PassConfig`."""
    fused_by: ClassVar[tuple[str, ...]] = ()
    """Such passes for which the patch is refused, where they have something to fuse."""

    tells_tokens: ClassVar[bool] = False
    """Whether its calls hold token ids, which are text: they are not recorded."""

    def __init__(self, target: Any = None) -> None:
        """Prepare the point; `target` is unused, since classes and modules are patched."""
        self._swaps: list[AttributePatch | SharedPatch] = []
        """The installed replacements."""

    @classmethod
    def fingerprint(cls) -> Fingerprint:
        return sources.fingerprint(cls.parts)

    @abstractmethod
    def find(self) -> str: ...

    @abstractmethod
    def install(self, kernel: Dispatcher) -> None: ...

    @abstractmethod
    def of_role(self, layer: Any) -> bool:
        """Whether a module of a loaded model is a layer of this point's role."""

    @abstractmethod
    def applies(self, layer: Any) -> str | None:
        """Why a layer of the role keeps the engine's own code; None if the patch takes it."""

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """The layer's own tensors that every call passes, by their names in the contract."""
        return {}

    def name_lost_fusions(self) -> None:
        """Warn of passes of the current configuration that no longer find what they would fuse."""
        if lost := passes_on(self.fusions):
            log.warning(
                "%s: what the patch runs is no longer fused by %s", self.name, ", ".join(lost)
            )

    def remove(self) -> None:
        swaps, self._swaps = self._swaps, []
        remove_all(swaps)
