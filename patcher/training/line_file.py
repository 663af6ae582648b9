"""A file of records, one a line, that a kill may end in the middle of a line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from patcher.bench import Record, VerificationError
from patcher.runs import durable

R = TypeVar("R", bound=Record)


class LineFile(Generic[R]):
    """Appends whole batches, durably; what a kill left of a last line is cut off by the next.

    Args:
        path: of the file, which need not exist.
        kind: of its records.
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path, self._kind = path, kind

    def read(self) -> list[R]:
        """Every whole record.

        Raises:
            VerificationError: a line is no such record.
        """
        if not self.path.is_file():
            return []
        # not splitlines(): a reply may hold U+2028, which JSON does not escape
        *lines, _ = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        try:
            return [self._kind.model_validate_json(line) for line in lines]
        except ValidationError as error:
            raise VerificationError(
                f"{self.path} holds a line that is no {self._kind.__name__}",
                "restore it from a copy, or give a new folder",
            ) from error

    def append(self, records: Iterable[R]) -> None:
        """Add records: all of them or, after a kill, those whose lines are whole.

        Raises:
            MissingError: the disk is full or broken.
        """
        text = "".join(each.model_dump_json() + "\n" for each in records)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = _whole(handle)
            os.lseek(handle, size, os.SEEK_SET)
            durable.append(handle, text.encode(), size)
        finally:
            os.close(handle)

    def keep(self, wanted: Callable[[R], bool]) -> list[R]:
        """Drop every other record, durably; those that are left."""
        found = self.read()
        left = [each for each in found if wanted(each)]
        if len(left) < len(found):
            durable.write_whole(self.path, "".join(f"{each.model_dump_json()}\n" for each in left))
        return left


def _whole(handle: int) -> int:
    """Where the last whole line ends."""
    size = os.fstat(handle).st_size
    while size:
        step = min(size, 1 << 16)
        at = os.pread(handle, step, size - step).rfind(b"\n")
        if at >= 0:
            return size - step + at + 1
        size -= step
    return 0
