"""SGLang's code: its modules, and the record of the versions read; see `SourceRecord`.

`python -m patcher.integrate.sglang.points` compares an installed or unpacked SGLang with the
record, and writes it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar

from patcher.bench import VerificationError
from patcher.integrate.source_record import SourceRecord
from patcher.integrate.source_tree import SourceTree


class SglangTree(SourceTree):
    """A folder that holds the package `sglang`."""

    package: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"


RECORD = SourceRecord(Path(__file__).with_name("sources.json"), SglangTree)
"""What was read of SGLang."""


def module(name: str) -> Any:
    """Import a module of the installed SGLang.

    Raises:
        MissingError: SGLang, or a package that its module needs, is not installed.
        VerificationError: this version of SGLang has no such module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.startswith("sglang.") and missing in name:
            raise VerificationError(
                f"this SGLang has no module {missing}", f"serve with {RECORD.known_versions()}"
            ) from error
        raise SglangTree.missing(missing) from error
