"""What every patch point of vLLM is: a name, the parts that were read, and functions replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.swap import AttributePatch, remove_all


class VllmPoint(ABC):
    """A patch point; see `patcher.integrate.points.PatchPoint` for the methods."""

    engine: ClassVar[str] = "vllm"
    name: ClassVar[str]
    op: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Source text that it replaces or relies on: `module:attribute`."""
    wants: ClassVar[Mapping[str, str]] = {}
    """Arguments of `LLM` without which vLLM never comes there, where it is told otherwise."""

    def __init__(self, target: Any = None) -> None:
        """Takes no target: classes and modules are patched, before models are built of them."""
        self._swaps: list[AttributePatch] = []
        """What is in."""

    @classmethod
    def fingerprint(cls) -> str:
        return sources.fingerprint(cls.parts)

    @abstractmethod
    def find(self) -> str: ...

    @abstractmethod
    def install(self, kernel: Dispatcher) -> None: ...

    def remove(self) -> None:
        swaps, self._swaps = self._swaps, []
        remove_all(swaps)
