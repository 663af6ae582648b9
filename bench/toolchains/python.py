"""Triton and PyTorch: a Python file, checked as text and loaded only in the runner."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import time
from pathlib import Path

from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract
from patcher.bench.toolchains import Built, Missing, Toolchain

_FOUND: dict[str, tuple[tuple[str, ...], str]] = {}
"""Of each package that was found: Python's path then, and the file that would be imported."""


def installed(package: str) -> bool:
    """Whether a package can be imported. One that was found is searched again only when Python's
    path has changed or its file is gone: beside busy threads each folder of the path costs a turn
    of Python's lock, 0.2 s in all on a GPU host.
    """
    path = tuple(sys.path)
    found = _FOUND.get(package)
    if found is not None and found[0] == path and os.path.isfile(found[1]):
        return True
    spec = importlib.util.find_spec(package)
    _FOUND.pop(package, None)
    if spec is not None and spec.origin is not None:
        _FOUND[package] = path, spec.origin
    return spec is not None


class TorchToolchain(Toolchain):
    language = Language.TORCH
    package = "torch"

    def missing(self) -> Missing | None:
        if installed(self.package):
            return None
        return Missing(reason=f"{self.package} is not installed", fix=f"pip install {self.package}")

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        self.demand()
        begin = time.monotonic()
        log, path = "", None
        try:
            tree = ast.parse(candidate.source, candidate.file_name)
            if contract.name in {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            }:
                # Triton reads a kernel's source from its file, so it must be a file
                made = folder / candidate.digest[:32]
                made.mkdir(parents=True, exist_ok=True)
                path = made / candidate.file_name
                path.write_text(candidate.source, encoding="utf-8")
            else:
                log = f"no top-level function {contract.name}"
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # the last two: it is nested too deeply
            log = f"{type(error).__name__}: {error}"
        return Built(
            language=self.language,
            path=path,
            binding="python",
            command="python ast.parse",
            log=log,
            seconds=time.monotonic() - begin,
            cached=False,
        )


class TritonToolchain(TorchToolchain):
    language = Language.TRITON
    package = "triton"
