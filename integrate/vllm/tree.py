"""vLLM's Python files, installed or in an unpacked wheel."""

from __future__ import annotations

from typing import ClassVar

from patcher.integrate.source_tree import SourceTree


class Tree(SourceTree):
    """A folder that holds the package `vllm`."""

    package: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    ships: ClassVar[str] = "vllm/third_party"
