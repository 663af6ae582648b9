"""The languages of candidates: built-in ones, and those of other packages' toolchains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import EnumMeta, StrEnum
from pathlib import Path
from typing import Any, Literal

from patcher.bench.errors import MissingError, UsageError
from patcher.bench.plugins import Registry

_TOOLCHAINS: Registry[Any] = Registry("toolchains")


@dataclass(frozen=True)
class LanguageTraits:
    """Properties of a language. A toolchain of another package has them as its class attribute
    `traits`.
    """

    suffix: str
    """Suffix of a source file, with its dot."""
    tags: tuple[str, ...]
    """Tags of fenced blocks in replies; prompts ask for the first one."""
    device: Literal["cpu", "cuda"] | None
    """Device that its kernels run on; None: that of their tensors."""
    in_python: bool = False
    """Whether a source is a Python file that is loaded unchanged."""
    compile_only: bool = False
    """Whether the judge can only compile it, since it cannot run on a device of its kind."""
    compiles_late: bool = False
    """Whether the first call of a shape may compile."""


class _WithPlugins(EnumMeta):
    """Iterates over languages of other packages, too."""

    def __iter__(cls) -> Iterator[Any]:
        yield from super().__iter__()
        for entry in _TOOLCHAINS.entries():
            yield cls(entry.name)


class Language(StrEnum, metaclass=_WithPlugins):
    CPP = "cpp"
    CUDA = "cuda"
    TRITON = "triton"
    TORCH = "torch"
    CUTEDSL = "cutedsl"
    """NVIDIA's CuTe DSL: Python, package nvidia-cutlass-dsl."""
    PTX = "ptx"
    """NVIDIA's virtual assembly, with comments that say how its kernels are launched."""
    HIP = "hip"
    SYCL = "sycl"
    METAL = "metal"

    @classmethod
    def _missing_(cls, value: object) -> Language | None:
        """The language of a toolchain from another package; one object per name."""
        if not isinstance(value, str) or value not in _TOOLCHAINS:
            return None
        if value not in _OF_OTHERS:
            found = str.__new__(cls, value)
            found._name_, found._value_ = value.upper(), value
            _OF_OTHERS[value] = found
        return _OF_OTHERS[value]

    @property
    def traits(self) -> LanguageTraits:
        """Raises MissingError where the package that brings it cannot be imported."""
        if self.value in _TRAITS:
            return _TRAITS[self.value]
        found: LanguageTraits = _TOOLCHAINS.load(self.value).traits
        return found

    @property
    def in_python(self) -> bool:
        """Whether a source is a Python file that is loaded unchanged."""
        return self.traits.in_python

    @property
    def compile_only(self) -> bool:
        """Whether the judge can only compile it, since it cannot run on a device of its kind."""
        return self.traits.compile_only


_OF_OTHERS: dict[str, Language] = {}
_TRAITS = {
    "cpp": LanguageTraits(suffix=".cpp", tags=("cpp", "c++", "cc", "cxx", "c"), device="cpu"),
    "cuda": LanguageTraits(
        suffix=".cu", tags=("cuda", "cu", "cuda-cpp", "cpp", "c++", "c"), device="cuda"
    ),
    "triton": LanguageTraits(
        suffix=".py",
        tags=("python", "py", "python3", "triton"),
        device="cuda",
        in_python=True,
        compiles_late=True,
    ),
    "torch": LanguageTraits(
        suffix=".py",
        tags=("python", "py", "python3", "pytorch", "torch"),
        device=None,
        in_python=True,
        compiles_late=True,
    ),
    "cutedsl": LanguageTraits(
        suffix=".py",
        tags=("python", "py", "python3", "cutedsl", "cute"),
        device="cuda",
        in_python=True,
        compiles_late=True,
    ),
    "ptx": LanguageTraits(suffix=".ptx", tags=("ptx", "asm", "nvptx"), device="cuda"),
    "hip": LanguageTraits(
        suffix=".hip",
        tags=("cpp", "c++", "cc", "cxx", "c", "hip", "cuda", "cu"),
        device="cuda",
        compile_only=True,
    ),
    "sycl": LanguageTraits(
        suffix=".cpp",
        tags=("cpp", "c++", "cc", "cxx", "c", "sycl"),
        device="cuda",
        compile_only=True,
    ),
    "metal": LanguageTraits(
        suffix=".metal",
        tags=("metal", "msl", "cpp", "c++", "c"),
        device="cuda",
        compile_only=True,
    ),
}
_SYCL = re.compile(r"^\s*#\s*include\s*[<\"](?:sycl|CL)/sycl\.hpp", re.MULTILINE)
_IMPORTS = {
    Language.CUTEDSL: re.compile(r"^\s*(?:import|from) cutlass\b", re.MULTILINE),
    Language.TRITON: re.compile(r"^\s*(?:import|from) triton\b", re.MULTILINE),
}


def guess_language(path: Path, source: str) -> Language:
    """Infer the language from the suffix; SYCL and C++ differ by headers, Triton, CuTe DSL and
    PyTorch by imports.

    Raises:
        UsageError: no language has this suffix, or several of other packages do.
    """
    match path.suffix:
        case ".cu":
            return Language.CUDA
        case ".ptx":
            return Language.PTX
        case ".hip":
            return Language.HIP
        case ".metal":
            return Language.METAL
        case ".cpp" | ".cc" | ".cxx":
            return Language.SYCL if _SYCL.search(source) else Language.CPP
        case ".py":
            found = (language for language, form in _IMPORTS.items() if form.search(source))
            return next(found, Language.TORCH)
    fitting, broken = _of_others(path.suffix)
    if len(fitting) == 1:
        return fitting[0]
    hint = f"choose it by --language {'|'.join(Language)}"
    raise UsageError(f"cannot tell the language of {path.name}", "; ".join([hint, *broken]))


def _of_others(suffix: str) -> tuple[list[Language], list[str]]:
    """Languages of other packages with that suffix, and why some could not be loaded."""
    fitting, broken = [], []
    for entry in _TOOLCHAINS.entries():
        try:
            language = Language(entry.name)
            if language.traits.suffix == suffix:
                fitting.append(language)
        except MissingError as error:
            broken.append(error.message)
    return fitting, broken
