"""Errors of programs that run a model: one sentence each, whatever the program printed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.workload import Workload

_ERROR = re.compile(
    r"((\([^)]*\)|\[rank\d+\]:|ERROR \S+ \S+ \[\w+\.py:\d+\]) *)*"
    r"([\w.]*(Error|Exception|Exit|Interrupt)\b(?! \w).*)"
)
"""The line of a traceback that names the exception; vLLM prepends the process and what logs it,
PyTorch the rank."""
_ELSEWHERE = "root cause"
"""In what vLLM's processes raise when another one failed: its exception is above."""
_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
_LONGEST = 300


class EndedError(PatcherError):
    """A program ended that should not have.

    Args:
        message: which one and how, with its reason.
        hint: where its output is.
        said: its reason alone.
    """

    def __init__(self, message: str, hint: str, said: str) -> None:
        super().__init__(message, hint)
        self.said = said


@contextmanager
def memory_errors(workload: Workload) -> Iterator[None]:
    """Turn errors of the allocator into one sentence.

    Raises:
        UsageError: the workload needs more memory than there is.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        if is_memory_error(error):
            raise UsageError(
                f"{workload.model} at batch {workload.batch:,} with {workload.input_len:,} prompt "
                f"tokens needs more memory than this machine's {workload.device} has",
                "give a smaller batch or fewer tokens",
            ) from error
        raise


def is_memory_error(error: Exception) -> bool:
    """Whether an allocator raised it."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)


def child_failed(what: str, code: int, output: bytes) -> PatcherError:
    """The error for a program that failed; its output goes to a log file, which it names.

    Args:
        what: the program, as the subject of a sentence.
        code: its exit code, negative for a signal.
        output: what it printed.
    """
    return ended(f"{what} failed (exit code {code})", output)


def ended(how: str, output: bytes) -> EndedError:
    """The error for a program that ended too early; `how` is a sentence without its reason."""
    said = last_error(output) or "it printed nothing"
    with tempfile.NamedTemporaryFile(prefix="patcher-", suffix=".log", delete=False) as log:
        log.write(output)
    return EndedError(f"{how}: {said}", f"its output is in {log.name}", said)


def last_error(output: bytes) -> str:
    """The last exception that a program printed, else its last line; at most 300 characters."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    named = [found[3] for line in lines if (found := _ERROR.match(line))]  # warnings may follow it
    last = (
        [one for one in named if _ELSEWHERE not in one] or named or [line for line in lines if line]
    )
    return last[-1][:_LONGEST] if last else ""
