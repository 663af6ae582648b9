"""From one source file to something callable: build it, and load what was built.

`build` runs compilers with a fixed argument list and a scrubbed environment and never loads
anything; `load` is for the process that runs the kernel: the judge's runner, or a served engine
once the kernel is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bench.candidate import Candidate, Language
from bench.contract import Contract
from bench.errors import UsageError
from bench.judge.kit import loading
from bench.records import Record


class Built(Record):
    """What a build made, ready for `load`. A failed build has `path` None and says why in `log`."""

    language: Language
    path: Path | None
    binding: str
    """`tvm-ffi`, `torch` or `python`: how the entry is reached."""
    command: str
    """What was run, without paths of this machine."""
    log: str
    seconds: float
    cached: bool

    @property
    def ok(self) -> bool:
        return self.path is not None


class Toolchain(Protocol):
    def missing(self) -> str | None:
        """Why it cannot build here, or None."""
        ...

    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built: ...


def toolchain(language: Language) -> Toolchain:
    from bench.toolchains.native import CppToolchain, CudaToolchain
    from bench.toolchains.python import TorchToolchain, TritonToolchain

    known: dict[Language, type[Toolchain]] = {
        Language.CPP: CppToolchain,
        Language.CUDA: CudaToolchain,
        Language.TRITON: TritonToolchain,
        Language.TORCH: TorchToolchain,
    }
    return known[language]()


def cache_root() -> Path:
    """`$PATCHER_CACHE`, or `$XDG_CACHE_HOME/patcher`, or `~/.cache/patcher`."""
    if chosen := os.environ.get("PATCHER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patcher"


def build(candidate: Candidate, contract: Contract, folder: Path | None = None) -> Built:
    """Build a candidate, or find it built: the cache is keyed by source, flags and compiler.

    Raises:
        UsageError: the cache folder cannot be written.
        MissingError: the language has no compiler here.
    """
    root = folder or cache_root() / "build"
    try:
        root.mkdir(parents=True, exist_ok=True)
        return toolchain(candidate.language).build(candidate, contract, root)
    except OSError as error:
        raise UsageError(
            f"cannot write {root}: {error.strerror}", "set PATCHER_CACHE to a writable folder"
        ) from error


def load(built: Built, entry: str) -> Callable[..., Any]:
    """The entry as a Python callable that takes torch tensors and scalars in the contract's
    order.
    """
    assert built.path is not None
    return loading.load(str(built.path), built.binding, entry)


__all__ = ["Built", "Toolchain", "build", "cache_root", "load", "toolchain"]
