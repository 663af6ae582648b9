"""Turn a source file into a callable: build it, and load the result.

`build` runs compilers with a fixed argument list and a scrubbed environment, and never loads
anything. `load` is for the process that runs the kernel: the judge's runner, or a served engine
once the kernel is accepted.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from patcher.bench.errors import MissingError, UsageError
from patcher.bench.ops.candidate import Candidate, Language
from patcher.bench.ops.contract import Contract
from patcher.bench.ops.language import LanguageTraits
from patcher.bench.plugins import Registry
from patcher.bench.records import Record
from patcher.bench.runner import loading

EXAMPLE_OP = "scaled_add"
"""The op of every toolchain's one-shot example: `scaled_add(x, y, out, scale)`."""
TOOLCHAINS: Registry[type[Toolchain]] = Registry("toolchains")
"""By language; a class of another package also has `traits`, its `LanguageTraits`."""
_FENCED = re.compile(r"^```\w+\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)


class Built(Record):
    """The result of a build, for `load`. A failed build has `path` None and the reason in `log`."""

    language: Language
    path: Path | None
    binding: str
    """How the entry is called: `tvm-ffi`, `torch` or `python`; `none`: it was compiled only."""
    command: str
    """The build command, without paths of this machine."""
    log: str
    seconds: float
    cached: bool

    @property
    def ok(self) -> bool:
        return self.path is not None


class Missing(Record):
    """What a toolchain lacks on this machine."""

    reason: str
    fix: str
    """What to install."""

    def __str__(self) -> str:
        return self.reason


class Toolchain(Protocol):
    """A programming model: its requirements, its build, and its hints for prompts."""

    language: Language

    @abstractmethod
    def missing(self) -> Missing | None:
        """What is missing to build on this machine; None if it is available."""
        ...

    @abstractmethod
    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        """Compile into `folder`; nothing of the result is run.

        Raises:
            MissingError: a requirement is missing.
        """
        ...

    def demand(self) -> None:
        """Check that the toolchain is available.

        Raises:
            MissingError: it is not; the hint says what to install.
        """
        if missing := self.missing():
            raise MissingError(f"cannot build {self.language} here: {missing}", missing.fix)

    @property
    def hints(self) -> str:
        """Hints on how to write a candidate, as a Jinja template over the contract: the file
        `hints/LANGUAGE.md.j2` of the package that has the class.
        """
        package = type(self).__module__.rpartition(".")[0] or type(self).__module__
        place = resources.files(package) / "hints" / f"{self.language}.md.j2"
        return place.read_text(encoding="utf-8")

    @property
    def example(self) -> str:
        """The one-shot example in the hints: a complete, correct source of `EXAMPLE_OP`."""
        *_, last = _FENCED.finditer(self.hints)
        return last["source"]


def toolchain(language: Language) -> Toolchain:
    """The toolchain of a language, built-in or from another package.

    Raises:
        MissingError: that package cannot be imported.
    """
    found: type[Toolchain] = TOOLCHAINS.load(language.value)
    return found()


def cache_root() -> Path:
    """`$PATCHER_CACHE`, or `$XDG_CACHE_HOME/patcher`, or `~/.cache/patcher`."""
    if chosen := os.environ.get("PATCHER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patcher"


def build(candidate: Candidate, contract: Contract, folder: Path | None = None) -> Built:
    """Build a candidate, or use its cached build, whose key is source, flags and compiler.

    Raises:
        UsageError: the cache folder cannot be written.
        MissingError: this machine has no compiler for the language.
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
    """The entry as a Python callable that takes torch tensors and scalars in the contract's order.

    Raises:
        UsageError: its language can only be compiled.
    """
    assert built.path is not None
    if built.binding == "none":
        raise UsageError(
            f"a {built.language} kernel can only be compiled, not run",
            "write it in cpp, cuda, ptx, triton or cutedsl",
        )
    return loading.load(str(built.path), built.binding, entry)


__all__ = [
    "EXAMPLE_OP",
    "TOOLCHAINS",
    "Built",
    "LanguageTraits",
    "Missing",
    "Toolchain",
    "build",
    "cache_root",
    "load",
    "toolchain",
]
