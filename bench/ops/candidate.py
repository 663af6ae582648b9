"""A candidate: one source file and its language."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from pathlib import Path

from patcher.bench.errors import UsageError
from patcher.bench.ops.header import comment_mark, split_header
from patcher.bench.records import Record


class Language(StrEnum):
    CPP = "cpp"
    CUDA = "cuda"
    TRITON = "triton"
    TORCH = "torch"
    CUTEDSL = "cutedsl"
    """NVIDIA's CuTe DSL: Python, package nvidia-cutlass-dsl."""
    HIP = "hip"
    SYCL = "sycl"
    METAL = "metal"

    @property
    def in_python(self) -> bool:
        """Whether a source is a Python file that is loaded as it is."""
        return self in (Language.TORCH, Language.TRITON, Language.CUTEDSL)

    @property
    def compile_only(self) -> bool:
        """Whether the judge can only compile it: no device of its kind is driven here."""
        return self in (Language.HIP, Language.SYCL, Language.METAL)


SUFFIXES = {
    Language.CPP: ".cpp",
    Language.CUDA: ".cu",
    Language.TRITON: ".py",
    Language.TORCH: ".py",
    Language.CUTEDSL: ".py",
    Language.HIP: ".hip",
    Language.SYCL: ".cpp",
    Language.METAL: ".metal",
}
_SYCL = re.compile(r"^\s*#\s*include\s*[<\"](?:sycl|CL)/sycl\.hpp", re.MULTILINE)
_IMPORTS = {
    Language.CUTEDSL: re.compile(r"^\s*(?:import|from) cutlass\b", re.MULTILINE),
    Language.TRITON: re.compile(r"^\s*(?:import|from) triton\b", re.MULTILINE),
}


class Candidate(Record):
    """One source file for one op. Its entry is a function named like the op.

    The entry takes the contract's tensors and scalars in order and writes what the contract says
    is written.
    """

    op: str
    language: Language
    source: str

    @property
    def digest(self) -> str:
        """sha256 of the language and source."""
        return hashlib.sha256(f"{self.language}\0{self.source}".encode()).hexdigest()

    @property
    def file_name(self) -> str:
        return f"{self.op}{SUFFIXES[self.language]}"

    @classmethod
    def from_file(cls, op: str, path: Path, language: Language | None = None) -> Candidate:
        """Read a candidate from a file, without a header of the library that states its digest.

        Where what follows such a header is no longer what it states, the whole file is read: it is
        another source than was judged.

        Raises:
            UsageError: the file cannot be read as text, or its language cannot be told.
        """
        try:
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror}", "give the path of a source file"
            ) from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not UTF-8 text", "give the path of a source file"
            ) from error
        whole = cls(op=op, language=language or guess_language(path, source), source=source)
        stated, below = split_header(source, comment_mark(whole.language.in_python)) or ("", "")
        judged = whole.model_copy(update={"source": below})
        return judged if judged.digest == stated else whole


def guess_language(path: Path, source: str) -> Language:
    """Tell the language by suffix; SYCL from C++ by its header, Triton and CuTe DSL from PyTorch
    by their imports.
    """
    match path.suffix:
        case ".cu":
            return Language.CUDA
        case ".hip":
            return Language.HIP
        case ".metal":
            return Language.METAL
        case ".cpp" | ".cc" | ".cxx":
            return Language.SYCL if _SYCL.search(source) else Language.CPP
        case ".py":
            found = (language for language, form in _IMPORTS.items() if form.search(source))
            return next(found, Language.TORCH)
    raise UsageError(
        f"cannot tell the language of {path.name}", f"say it with --language {'|'.join(Language)}"
    )
