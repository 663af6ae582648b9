"""From one source file to something callable: build it, and load what was built.

`build` runs compilers with a fixed argument list and a scrubbed environment and never loads
anything; `load` is for the process that runs the kernel: the judge's runner, or a served engine
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
"""What every toolchain's one-shot example computes: `scaled_add(x, y, out, scale)`."""
TOOLCHAINS: Registry[type[Toolchain]] = Registry("toolchains")
"""By language; a class of another package also has `traits`, its `LanguageTraits`."""
_FENCED = re.compile(r"^```\w+\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)


class Built(Record):
    """What a build made, ready for `load`. A failed build has `path` None and says why in `log`."""

    language: Language
    path: Path | None
    binding: str
    """How the entry is reached: `tvm-ffi`, `torch` or `python`; `none`: it was compiled only."""
    command: str
    """What was run, without paths of this machine."""
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
    """A programming model: what it needs here, how it builds, and what a model is told of it."""

    language: Language

    @abstractmethod
    def missing(self) -> Missing | None:
        """What keeps it from building here, or None where it is available."""
        ...

    @abstractmethod
    def build(self, candidate: Candidate, contract: Contract, folder: Path) -> Built:
        """Compile into `folder`; nothing of the result is run.

        Raises:
            MissingError: what it needs is not here.
        """
        ...

    def demand(self) -> None:
        """Raises:
        MissingError: it is not available here; the hint says what to install.
        """
        if missing := self.missing():
            raise MissingError(f"cannot build {self.language} here: {missing}", missing.fix)

    @property
    def hints(self) -> str:
        """How a candidate is written, as a Jinja template over the contract: the file
        `hints/LANGUAGE.md.j2` of the package that has the class.
        """
        package = type(self).__module__.rpartition(".")[0] or type(self).__module__
        place = resources.files(package) / "hints" / f"{self.language}.md.j2"
        return place.read_text(encoding="utf-8")

    @property
    def example(self) -> str:
        """The one-shot example in the hints: a whole right source of `EXAMPLE_OP`."""
        *_, last = _FENCED.finditer(self.hints)
        return last["source"]


def toolchain(language: Language) -> Toolchain:
    """The toolchain of a language: ours, or of the package that brings it.

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

    Raises:
        UsageError: it is of a language that is only compiled.
    """
    assert built.path is not None
    if built.binding == "none":
        raise UsageError(
            f"a {built.language} kernel is only compiled: nothing here runs it",
            "write it in cpp, cuda, triton or cutedsl",
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
