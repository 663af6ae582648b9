"""What the formats that a patch can be exported to have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Candidate, Contract, Evaluation, Language, Record

CARRIED = "patcher.json"
Format = Literal["hf-kernels", "flashinfer"]
Files = dict[str, bytes]
"""What a format writes: content by path in the folder."""


class ExportRecord(Record):
    """`patcher.json` of an export: what the format itself cannot say."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    op: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Names a folder of an import, so it can be no path."""
    language: Language
    digest: str
    """Of the candidate: language and source."""
    source: str
    """Where the source is: a path in the folder, or (flashinfer) one of the Solution's sources."""
    contract: Contract
    evidence: Evaluation
    left_out: tuple[str, ...]


class ExportedFiles(Record):
    """What one format made of a patch; paths are of the folder to be."""

    files: Files
    source: str
    variant: str | None = None
    left_out: tuple[str, ...]


def device_of(candidate: Candidate, evidence: Evaluation) -> str:
    """`cpu` or `cuda`: where the kernel was judged."""
    match candidate.language:
        case Language.CPP:
            return "cpu"
        case Language.CUDA | Language.TRITON | Language.CUTEDSL:
            return "cuda"
    return evidence.environment.device_kind if evidence.environment else "cpu"
