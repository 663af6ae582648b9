"""`patcher.recorded`: what a transformers model hands to the code that a patch would replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patcher.bench import Count, FilePath, UsageError, check_arguments


class RecordedCalls:
    """What is recorded at a point, counted live."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.file: Path = recorder.file
        """The file, which is written when the block ends. Until then, and where its process is
        killed, what was recorded is beside it in `FILE.parts`, which readers take for it."""

    @property
    def seen(self) -> int:
        """Calls of the point."""
        return int(self._recorder.seen)

    @property
    def recorded(self) -> int:
        """Calls in the file."""
        return len(self._recorder.calls)

    @property
    def left_out(self) -> dict[str, int]:
        """Calls that were chosen and could not be recorded, by reason."""
        found: dict[str, int] = self._recorder.record().left_out
        return found

    def __repr__(self) -> str:
        return f"<RecordedCalls {self.file}: {self.recorded} of {self.seen:,} calls>"


@check_arguments
@contextmanager
def recorded(
    model: Any, point: str, file: FilePath, *, calls: Count = 16, megabytes: float = 64.0
) -> Iterator[RecordedCalls]:
    """Record calls at a patch point of a transformers model for as long as a block runs.

    The model computes as before. Of some calls the inputs and what the model's own code made of
    them are written to a file: shapes, strides, dtypes and values, no text. Values come from what
    the model is given, so give it texts that whoever has the file may see.

    `patcher ops observe FILE` says what is in it, and `patcher.evaluate(..., recorded=FILE)` judges
    a kernel on it.

    Args:
        model: a built transformers model.
        point: a patch point, such as `norm`; `patcher ops` lists them.
        file: the safetensors file to write; one that is there is replaced.
        calls: most calls to record, of different layers where their weights tell.
        megabytes: most values to record, in MB.

    Yields:
        The calls that were seen and recorded, counted while they happen.

    Raises:
        UsageError: no model, no such point, or the point is patched already.
        MissingError: transformers or safetensors is not here.
        VerificationError: the model is not what the point replaces.

    Examples:
        >>> with patcher.recorded(model, "norm", "norm.safetensors"):
        ...     output = model.generate(**inputs)
        >>> v = patcher.evaluate("rms_norm", "kernel.cpp", recorded="norm.safetensors")
    """
    if model is None:
        raise UsageError("no model to record", "give a built transformers model")
    from patcher.integrate import RecordingLimits, recorder

    limits = RecordingLimits(calls, megabytes)
    with recorder("transformers", point, Path(file), model, limits) as found:
        yield RecordedCalls(found)
