"""The common part of vLLM's patch points: names, fingerprints and restoring functions."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import Fingerprint
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import passes_on
from patcher.integrate.vllm.families import architectures
from patcher.integrate.vllm.swap import AttributePatch, SharedPatch, remove_all
from patcher.integrate.vllm.tree import Tree

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
    layers: ClassVar[tuple[str, ...]]
    """Names by which vLLM's model files build the layers of the role, all of which a model needs;
    `A|B` is either of two, as where a version renamed one."""
    fusions: ClassVar[tuple[str, ...]] = ()
    """The compiler's passes that would fuse what it replaces, by their names in `PassConfig`."""
    weights: ClassVar[str | None] = None
    """The `quant_method` of the checkpoints whose layers it takes; None for plain weights."""

    def __init__(self, target: Any = None) -> None:
        """Prepare the point; `target` is unused, since classes and modules are patched."""
        self._swaps: list[AttributePatch | SharedPatch] = []
        """The installed replacements."""

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> str:
        """How the installed vLLM builds layers of the role for a model, by its config.json.

        The files of models are read, not run: a model may leave out a layer that it refers to.

        Raises:
            MissingError: vLLM is not installed.
            VerificationError: the model has none; the message says why.
        """
        tree = Tree.installed()
        names = [str(name) for name in config.get("architectures") or ()]
        known = architectures(tree, names)
        if not known:
            raise VerificationError(
                f"vLLM {tree.version()} has no model {' or '.join(names) or 'without a class'}",
                "see `architectures` in its config.json",
            )
        one = next(iter(known.values()))
        if not one.builds(cls.layers):
            raise VerificationError(
                f"{one.name} has no layer of {cls.name}: {one.module} does not refer to "
                f"{' and '.join(cls.layers).replace('|', ' or ')}",
                "revert the patch for this model",
            )
        method = (config.get("quantization_config") or {}).get("quant_method")
        if cls.weights is not None and method != cls.weights:
            raise VerificationError(
                f"{cls.name} takes {cls.weights} weights, those of this {one.name} are "
                f"{method or 'not quantised'}",
                "revert the patch for this model",
            )
        flat = "; it is flat, so kernels of its own may bypass some of them" if one.is_flat else ""
        return f"{one.name} has layers of {cls.name}, by {one.module}{flat}"

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
