"""vLLM's code: its modules, and the record of the versions read; see `SourceRecord`.

`python -m patcher.integrate.vllm.points` compares an installed or unpacked vLLM with the record,
and writes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from patcher.bench import VerificationError
from patcher.integrate.points import Fingerprint
from patcher.integrate.source_record import Reading, SourceRecord
from patcher.integrate.vllm.tree import Tree

_USER = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
DIGESTS = Path(__file__).with_name("sources.json")


def record() -> SourceRecord:
    """What was read of vLLM."""
    return SourceRecord(DIGESTS, Tree)


def module(name: str) -> Any:
    """Import a module of the installed vLLM.

    Raises:
        MissingError: vLLM, or a package that its module needs, is not installed.
        VerificationError: this version of vLLM has no such module.
    """
    try:
        if name.startswith("triton_kernels"):
            # vLLM ships, aliases and modifies a copy when the module that uses it is imported
            importlib.import_module(_USER)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.startswith(("vllm.", "triton_kernels")) and missing in name:
            raise VerificationError(
                f"this vLLM has no module {missing}", f"serve with {record().known_versions()}"
            ) from error
        raise Tree.missing(missing) from error


def part(name: str) -> Any:
    """The object `module:attribute.attribute`; None if this version has none.

    Raises:
        MissingError: see `module`.
    """
    where, _, path = name.partition(":")
    value: Any = module(where)
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    return value


def readings() -> dict[str, Reading]:
    """See `SourceRecord.readings`."""
    return record().readings()


def versions_read() -> tuple[str, ...]:
    """See `SourceRecord.versions_read`."""
    return record().versions_read()


def unread(names: Iterable[str], tree: Tree) -> dict[str, str]:
    """See `SourceRecord.unread`."""
    return record().unread(names, tree)


def fingerprint(names: tuple[str, ...]) -> Fingerprint:
    """See `SourceRecord.fingerprint`."""
    return record().fingerprint(names)


def must_be_as_read(point: str, names: tuple[str, ...]) -> None:
    """See `SourceRecord.must_be_as_read`."""
    record().must_be_as_read(point, names)


def untested() -> str | None:
    """See `SourceRecord.untested`."""
    return record().untested()
