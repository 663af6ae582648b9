"""A candidate: one source file and its language."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path

from bench.errors import UsageError
from bench.records import Record


class Language(StrEnum):
    CPP = "cpp"
    CUDA = "cuda"
    TRITON = "triton"
    TORCH = "torch"


SUFFIXES = {
    Language.CPP: ".cpp",
    Language.CUDA: ".cu",
    Language.TRITON: ".py",
    Language.TORCH: ".py",
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
        """Read a candidate from a file.

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
        return cls(op=op, language=language or guess_language(path, source), source=source)


def guess_language(path: Path, source: str) -> Language:
    """Tell the language by suffix, and Triton from PyTorch by its import."""
    match path.suffix:
        case ".cu":
            return Language.CUDA
        case ".cpp" | ".cc" | ".cxx":
            return Language.CPP
        case ".py":
            return Language.TRITON if "import triton" in source else Language.TORCH
    raise UsageError(
        f"cannot tell the language of {path.name}", "say it with --language cpp|cuda|triton|torch"
    )
