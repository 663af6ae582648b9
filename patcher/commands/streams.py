"""The standard streams as a shell hands them over: closed, full, or of another encoding."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TextIO

from patcher.bench import UsageError


class StdoutError(UsageError):
    """Standard output takes no result, so this is said on standard error."""


class ReaderGoneError(Exception):
    """Who reads stdout has closed it, as `head` does: there is no more to say."""


class Result(io.TextIOWrapper):
    """Standard output, whose failures are told apart from those of every other file."""

    def write(self, text: str, /) -> int:
        with self._told():
            return super().write(text)

    def flush(self) -> None:
        with self._told():
            super().flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drop()
            if isinstance(error, BrokenPipeError):
                raise ReaderGoneError from error
            raise StdoutError(
                f"cannot write the result to stdout: {error.strerror}",
                "make room, or redirect stdout to another file",
            ) from error

    def _drop(self) -> None:
        """Python writes out its buffers once more when it ends: into nothing."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


class Messages(io.TextIOWrapper):
    """Standard error: a message that cannot be written is lost, and the command goes on, since the
    result is on stdout and may be the end of hours of measurement."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare() -> None:
    """Make all three streams usable: a closed one becomes the null device, and a character that the
    encoding of a stream lacks is written as an escape such as `\\u2192`.

    Raises:
        StdoutError: it is closed, so no result could be written.
    """
    closed = sys.stdout is None
    for number in (0, 1, 2):  # else the next file that is opened gets the number
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays open)
    # a test's capture is of another type, and stays
    if closed or type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = Result(*_parts(sys.stdout, 1), newline="\n")
    if sys.stderr is None or type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = Messages(*_parts(sys.stderr, 2), line_buffering=True)
    if closed:
        raise StdoutError(
            "stdout is closed, so no result can be written", "redirect it: >/dev/null"
        )


def _parts(stream: TextIO | None, number: int) -> tuple[BinaryIO, str, str]:
    """Buffer, encoding and what becomes of a character that the encoding lacks."""
    if stream is None:
        return open(number, "wb", closefd=False), "utf-8", "backslashreplace"
    return stream.buffer, stream.encoding, "backslashreplace"


def require_text(words: list[str]) -> None:
    """Refuse words that are no text, before anything is made of them.

    Raises:
        UsageError: one has bytes that the locale's encoding cannot read.
    """
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            encoding = sys.getfilesystemencoding()
            raise UsageError(
                f"an argument is not {encoding} text: {word!a}",
                "rename the file or folder, or set a locale of its encoding: LC_ALL=C.UTF-8",
            ) from error
