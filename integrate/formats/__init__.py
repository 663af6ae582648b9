"""The common part of the export formats."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Candidate, Contract, Evaluation, Language, Record

CARRIED = "patcher.json"
Format = Literal["hf-kernels", "flashinfer"]
Files = dict[str, bytes]
"""The files of an export: content by path in the folder."""


class ExportRecord(Record):
    """`patcher.json` of an export: what the format itself cannot express."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    op: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """The op's name. An import creates a folder of this name, so it cannot be a path."""
    language: Language
    digest: str
    """Digest of the candidate: language and source."""
    source: str
    """Where the source is: a path in the folder, or (flashinfer) one of the Solution's sources."""
    contract: Contract
    evidence: Evaluation
    """The judge's verdict on the candidate."""
    left_out: tuple[str, ...]
    """What the format cannot express, one sentence each."""


class ExportedFiles(Record):
    """A patch in one format, before it is written."""

    files: Files
    source: str
    """Where the source is; see `ExportRecord`."""
    variant: str | None = None
    """hf-kernels: name of the build variant."""
    left_out: tuple[str, ...]


def device_of(candidate: Candidate, evidence: Evaluation) -> str:
    """The device that the kernel was judged on: `cpu` or `cuda`."""
    match candidate.language:
        case Language.CPP:
            return "cpu"
        case Language.CUDA | Language.PTX | Language.TRITON | Language.CUTEDSL:
            return "cuda"
    return evidence.environment.device_kind if evidence.environment else "cpu"
