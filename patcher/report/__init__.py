"""The results of a run: HTML for a person, Markdown for a pull request, JSON for a program."""

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
    """The record as indented JSON, for `Report.model_validate_json`."""
    return report.model_dump_json(indent=2) + "\n"


FORMATS = {"html": render_html, "md": render_markdown, "json": render_json}
"""File name suffix and renderer of each format."""


def write(
    report: Report,
    folder: Path,
    formats: Sequence[str] = ("html", "md", "json"),
    beside: str = "",
) -> list[Path]:
    """Write `report.<format>` into the folder, which is created if missing; returns the paths in
    that order. Each file is replaced atomically.

    Args:
        beside: distinguishes the temporary files of concurrent writers.

    Raises:
        UsageError: a format is unknown, or the folder cannot be written.
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
            "choose a writable folder",
        ) from error
    return written
