"""What a run found, for a person (HTML), a pull request (Markdown) and a machine (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patcher.bench import UsageError
from patcher.report.html import render_html
from patcher.report.markdown import render_markdown
from patcher.report.picture import plot
from patcher.report.record import PatchReceipts, ReceiptRow, Report

__all__ = [
    "FORMATS",
    "PatchReceipts",
    "ReceiptRow",
    "Report",
    "plot",
    "render_html",
    "render_json",
    "render_markdown",
    "write",
]


def render_json(report: Report) -> str:
    """The record as JSON, indented; `Report.model_validate_json` reads it back."""
    return report.model_dump_json(indent=2) + "\n"


FORMATS = {"html": render_html, "md": render_markdown, "json": render_json}
"""File name suffix and renderer of each format."""


def write(
    report: Report,
    folder: Path,
    formats: Sequence[str] = ("html", "md", "json"),
    beside: str = "",
) -> list[Path]:
    """Write `report.<format>` into the folder, made where it is missing; the paths in that order.
    Who looks on meanwhile sees the old one or the new one.

    Args:
        beside: tells apart the temporary files of several who write at a time.

    Raises:
        UsageError: an unknown format, or the folder cannot be written.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise UsageError(
            f"unknown report format {unknown[0]!r}", f"formats are: {', '.join(FORMATS)}"
        )
    texts = {name: FORMATS[name](report) for name in formats}
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = folder / f"report.{name}"
            temporary = folder / f".{path.name}{beside}.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
            written.append(path)
    except OSError as error:
        raise UsageError(
            f"cannot write the report into {folder}: {error.strerror}",
            "choose a folder that can be written",
        ) from error
    return written
