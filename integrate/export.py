"""Export a patch as a Hugging Face kernel repository or as a flashinfer-bench dataset.

Neither format holds a complete contract (`ExportResult.left_out` lists what is lost), so an export
adds `patcher.json`. An import reads the source from the format's own files and trusts that record
only if the digest matches.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from patcher.bench import SCHEMA_VERSION, Language, Record, UsageError
from patcher.integrate.formats import (
    CARRIED,
    ExportRecord,
    Format,
    flashinfer_dataset,
    hf_repository,
)
from patcher.integrate.patch import Patch

FORMATS = ("hf-kernels", "flashinfer")


class ExportResult(Record):
    """The result of an export."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    folder: str
    """The folder that was written."""
    digest: str
    """Digest of the candidate: language and source."""
    files: tuple[str, ...]
    """Paths in the folder, sorted."""
    variant: str | None
    """hf-kernels: name of the build variant. None if there is only the source layout, which must be
    built first."""
    left_out: tuple[str, ...]
    """What the format cannot express or this machine lacks, one sentence each."""


def export_patch(
    patch: Patch, to: str, out: Path, *, sweep: str | None = None, license: str = "unknown"
) -> ExportResult:
    """Write a patch in another project's format.

    Args:
        patch: the bundle.
        to: one of `FORMATS`.
        out: the folder to write; it is new or holds an earlier export.
        sweep: flashinfer: the sweep of the evidence, if the evidence does not name it.
        license: hf-kernels: the source's license identifier on the Hub.

    Returns:
        What was written and what was left out.

    Raises:
        UsageError: the format is unknown or cannot express this kernel, or the folder holds
            something else or cannot be written.
        VerificationError: the patch is damaged, or its op has changed since the patch was made.
    """
    if patch.manifest.language is Language.PTX and to in FORMATS:
        raise UsageError(
            f"{to} has no form for a PTX kernel, whose host function patcher generates",
            "export a kernel in CUDA C++, which may hold PTX inline",
        )
    match to:
        case "hf-kernels":
            written = hf_repository.write(patch, license)
        case "flashinfer":
            written = flashinfer_dataset.write(patch, sweep)
        case _:
            raise UsageError(f"unknown format {to!r}", f"choose {' or '.join(FORMATS)}")
    candidate = patch.candidate()
    record = ExportRecord(
        format=to,
        op=candidate.op,
        language=candidate.language,
        digest=candidate.digest,
        source=written.source,
        contract=patch.contract,
        evidence=patch.evaluation,
        left_out=written.left_out,
    )
    files = written.files | {CARRIED: (record.model_dump_json(indent=1) + "\n").encode()}
    if out.exists() and not (out / CARRIED).is_file():
        raise UsageError(f"{out} exists and is not an export", "choose another folder")
    _place(out, files)
    return ExportResult(
        format=to,
        folder=str(out),
        digest=candidate.digest,
        files=tuple(sorted(files)),
        variant=written.variant,
        left_out=written.left_out,
    )


def _place(out: Path, files: Mapping[str, bytes]) -> None:
    """Write all files or none: they are staged beside the folder and moved in one step."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as scratch:
            staged = Path(scratch) / "export"
            for name, content in files.items():
                path = staged / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if out.exists():
                shutil.move(out, Path(scratch) / "replaced")
            staged.rename(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}", "choose another --out") from error
