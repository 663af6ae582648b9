"""A language: functions over NumPy arrays that share memory with the tensors, on the CPU."""

from __future__ import annotations

import ast
import importlib.util
import time
from pathlib import Path
from typing import ClassVar

from patcher.bench import Candidate, Contract, Language
from patcher.bench.toolchains import Built, LanguageTraits, Missing, Toolchain

WRAPPED = """

import torch as _torch

_entry = {entry}


def _array(value):
    if not isinstance(value, _torch.Tensor):
        return value
    return value.view(_torch.uint16).numpy() if value.dtype is _torch.bfloat16 else value.numpy()


def {entry}(*args):
    _entry(*map(_array, args))
"""
"""NumPy has no bfloat16: such a tensor's bits come as uint16."""


class NumpyToolchain(Toolchain):
    language = Language("numpy")
    traits: ClassVar[LanguageTraits] = LanguageTraits(
        suffix=".np", tags=("python", "py", "numpy"), device="cpu", in_python=True
    )

    def missing(self) -> Missing | None:
        if importlib.util.find_spec("numpy"):
            return None
        return Missing(reason="numpy is not installed", fix="pip install numpy")

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        self.demand()
        begin, path, log = time.monotonic(), None, ""
        try:
            tree = ast.parse(candidate.source, candidate.file_name)
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            if contract.name not in names:
                raise SyntaxError(f"no top-level function {contract.name}")
            made = folder / candidate.digest[:32]
            made.mkdir(parents=True, exist_ok=True)
            path = made / f"{candidate.op}.py"
            wrapper = WRAPPED.format(entry=contract.name)
            path.write_text(candidate.source + wrapper, encoding="utf-8")
        except (SyntaxError, ValueError) as error:
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
