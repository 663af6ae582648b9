"""Out of patcher and in again: a patch as a Hugging Face kernel repository or as a flashinfer-bench
dataset, and either of them as a candidate source.

Neither format holds a whole contract (`Exported.left_out` says what is lost), so an export carries
`patcher.json` beside what the other side reads. An import reads the source from the other side's
own files and believes the record only where the digest fits.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from patcher.bench import SCHEMA_VERSION, Record, UsageError
from patcher.integrate.formats import (
    CARRIED,
    ExportRecord,
    Format,
    flashinfer_dataset,
    hf_repository,
)
from patcher.integrate.patch import Patch

FORMATS = ("hf-kernels", "flashinfer")


class Exported(Record):
    """What an export wrote."""

    schema_version: int = SCHEMA_VERSION
    format: Format
    folder: str
    digest: str
    files: tuple[str, ...]
    variant: str | None
    """hf-kernels: the build in it, which the loader takes where that name fits. None where there is
    the source layout alone, which must be built first."""
    left_out: tuple[str, ...]
    """What the format cannot say, or what is missing here, each in a sentence."""


def export_patch(
    patch: Patch, to: str, out: Path, *, sweep: str | None = None, license: str = "unknown"
) -> Exported:
    """Write a patch in another project's format. The folder is new, or an earlier export.

    Args:
        to: one of `FORMATS`.
        sweep: flashinfer: the sweep that the evidence is of, where it does not say so itself.
        license: hf-kernels: of the source, as the Hub spells it; a patch does not know it.

    Raises:
        UsageError: unknown format, the folder holds something else or cannot be written, or the
            format has no place for this kernel.
        VerificationError: the patch is damaged, or its op has changed since it was made.
    """
    match to:
        case "hf-kernels":
            written = hf_repository.write(patch, license)
        case "flashinfer":
            written = flashinfer_dataset.write(patch, sweep)
        case _:
            raise UsageError(f"unknown format {to!r}", f"say {' or '.join(FORMATS)}")
    candidate = patch.candidate()
    carried = ExportRecord(
        format=to,
        op=candidate.op,
        language=candidate.language,
        digest=candidate.digest,
        source=written.source,
        contract=patch.contract,
        evidence=patch.evaluation,
        left_out=written.left_out,
    )
    files = written.files | {CARRIED: (carried.model_dump_json(indent=1) + "\n").encode()}
    if out.exists() and not (out / CARRIED).is_file():
        raise UsageError(f"{out} exists and is not an export", "choose another folder")
    _place(out, files)
    return Exported(
        format=to,
        folder=str(out),
        digest=candidate.digest,
        files=tuple(sorted(files)),
        variant=written.variant,
        left_out=written.left_out,
    )


def _place(out: Path, files: Mapping[str, bytes]) -> None:
    """All files or none: they are written beside the folder and put there in one step."""
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
