"""What an imported op remembers of its problem."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Record

RECORD = "problem.json"


class ProblemRecord(Record):
    """`problem.json` of an op: what a `ModelNew` needs besides the contract."""

    schema_version: int = SCHEMA_VERSION
    op: str
    file: str
    """The problem's file name; its text stays where it is."""
    changed: dict[str, str]
    """Sizes that differ from the file's."""
    init: tuple[Any, ...]
    """Arguments of the module, as `problem.literal` reads them."""
    keywords: dict[str, Any]
    arguments: tuple[dict[str, Any], ...]
    """Arguments of `forward`: `{"tensor": NAME}` or `{"value": LITERAL}`."""
    state: dict[str, str]
    """The module's parameters and buffers by the op's names."""
    parameters: tuple[str, ...]
    """The op's names of the parameters, in the module's order."""
    constants: dict[str, str] = Field(default_factory=dict)
    """Tables of the tensors that are no part of the module's state: zlib's, in base64."""
    result: Any = None
    """How the module's result holds its tensors: see `results.py`. None, in files of earlier
    versions: one tensor, or a tuple of several."""
    scalars: tuple[str, ...] = ()
    """Results without an axis, which are one number in an axis in the contract."""
