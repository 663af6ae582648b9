"""Errors of programs that run a model: one sentence each, whatever the program printed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.workload import Workload

_ERROR = re.compile(r"((\([^)]*\)|\[rank\d+\]:) *)*([\w.]*(Error|Exception|Exit|Interrupt)\b.*)")
"""The line of a traceback that names the exception; vLLM prepends the process, PyTorch the rank."""
_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
_LONGEST = 300


@contextmanager
def memory_errors(workload: Workload) -> Iterator[None]:
    """Turn errors of the allocator into one sentence.

    Raises:
        UsageError: the workload needs more memory than there is.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
            raise UsageError(
                f"{workload.model} at batch {workload.batch:,} with {workload.input_len:,} prompt "
                f"tokens needs more memory than this machine's {workload.device} has",
                "give a smaller batch or fewer tokens",
            ) from error
        raise


def child_failed(what: str, code: int, output: bytes) -> PatcherError:
    """The error for a program that failed; its whole output goes to a log file, which it names.

    Args:
        what: the program, as the subject of a sentence.
        code: its exit code, negative for a signal.
        output: what it printed.
    """
    said = last_error(output.decode("utf-8", "replace")) or "it printed nothing"
    return PatcherError(f"{what} failed (exit code {code}): {said}", kept(output))


def last_error(output: str) -> str:
    """The last exception that a program printed, else its last line; at most 300 characters."""
    lines = [line.strip() for line in output.splitlines()]
    named = [found[3] for line in lines if (found := _ERROR.match(line))]  # warnings may follow it
    last = named or [line for line in lines if line]
    return last[-1][:_LONGEST] if last else ""


def kept(output: bytes) -> str:
    """Keep what a program printed in a file, and say where."""
    with tempfile.NamedTemporaryFile(prefix="patcher-", suffix=".log", delete=False) as log:
        log.write(output)
    return f"its whole output is in {log.name}"
