"""A candidate: one source file and its language."""

from __future__ import annotations

import hashlib
from pathlib import Path

from patcher.bench.errors import UsageError
from patcher.bench.ops.header import comment_mark, split_header
from patcher.bench.ops.language import Language, guess_language
from patcher.bench.records import Record, read_source


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
        return f"{self.op}{self.language.traits.suffix}"

    @classmethod
    def from_file(cls, op: str, path: Path, language: Language | None = None) -> Candidate:
        """Read a candidate from a file. A header of the library that states its digest is left out.

        If the rest no longer matches the stated digest, the whole file is read, since that is
        another source than the one that was judged.

        Raises:
            UsageError: the file is no regular file, is larger than 4 MiB, cannot be read as text,
                or its language is unknown.
        """
        try:
            source = read_source(path)
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


__all__ = ["Candidate", "Language", "guess_language"]
