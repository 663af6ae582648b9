"""Triton and PyTorch: a Python file, checked as text and loaded only in the runner."""

from __future__ import annotations

import ast
import importlib.util
import time
from pathlib import Path

from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract
from patcher.bench.toolchains import Built, Missing, Toolchain


class TorchToolchain(Toolchain):
    language = Language.TORCH
    package = "torch"

    def missing(self) -> Missing | None:
        if importlib.util.find_spec(self.package):
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
