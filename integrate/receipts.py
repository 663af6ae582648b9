"""What ran in a process, as a record: no patch is accepted without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from bench import SCHEMA_VERSION, Record, VerificationError

if TYPE_CHECKING:
    from integrate.dispatch import ReceiptBook


class Receipt(Record):
    """Calls of the patched kernel by shape, and calls that went to the original by reason."""

    schema_version: int = SCHEMA_VERSION
    patch_id: str
    digest: str
    """Of the patch bundle's manifest."""
    pid: int
    calls: dict[str, int]
    fallbacks: dict[str, int]

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @classmethod
    def of(cls, book: ReceiptBook) -> Receipt:
        return cls(
            patch_id=book.patch_id,
            digest=book.digest,
            pid=book.pid,
            calls=dict(book.calls),
            fallbacks=dict(book.fallbacks),
        )

    def write(self, path: Path) -> None:
        """Write it whole, by rename."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Receipt:
        """Read one back.

        Raises:
            VerificationError: missing, or not a receipt.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise VerificationError(
                f"{path.name} is no receipt", "run the patched engine again"
            ) from error
