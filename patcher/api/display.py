"""How results show themselves: charts, tables in a notebook, data frames, a progress bar."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patcher.bench import FilePath, MissingError, UsageError, check_arguments
from patcher.extras import missing_package

if TYPE_CHECKING:
    from pandas import DataFrame

StageReport = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass(frozen=True)
class Chart:
    """An SVG chart. A notebook shows it; `save` writes it to a file."""

    title: str
    svg: str
    """The whole document, with its style sheet, for light and dark pages."""

    @check_arguments
    def save(self, path: FilePath) -> Path:
        """Write the chart to a file.

        Args:
            path: a name that ends in `.svg`, or in `.png` where Chromium is installed.

        Returns:
            The path.

        Raises:
            UsageError: another suffix, or the file cannot be written.
            MissingError: a PNG is asked for and there is no Chromium.
        """
        target = Path(path)
        if target.suffix not in (".svg", ".png"):
            raise UsageError(f"{target.name} is no SVG or PNG file", "end the name in .svg or .png")
        try:
            if target.suffix == ".svg":
                target.write_text(self.svg, encoding="utf-8")
                return target
            from patcher.report.raster import to_png

            if why := to_png(self.svg, target):
                raise MissingError(why, "save it as .svg")
        except OSError as error:
            raise UsageError(
                f"cannot write {target}: {error.strerror}", "give a file that can be written"
            ) from error
        return target

    def __repr__(self) -> str:
        return f"<Chart: {self.title}>"

    def _repr_svg_(self) -> str:
        return self.svg


def data_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> DataFrame:
    """Rows as a pandas frame.

    Raises:
        MissingError: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    return pandas.DataFrame(list(rows), columns=list(columns))


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for a notebook; every text is escaped."""

    def cells(tag: str, texts: Sequence[object]) -> str:
        return "".join(f"<{tag}>{escape(str(text))}</{tag}>" for text in texts)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<table><caption style="text-align:left;caption-side:top">{escape(caption)}</caption>'
        f"<thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    )


@contextmanager
def progress_bar(progress: bool | StageReport) -> Iterator[StageReport]:
    """Where progress goes: to the caller's function, or to a bar on stderr.

    The bar is drawn on a terminal, and in a notebook that has ipywidgets.
    """
    if callable(progress):
        yield progress
        return
    if not progress or not _interactive():
        yield lambda stage, done, total: None
        return
    from rich.console import Console

    from patcher.show.progress import stage_bar

    with stage_bar(Console(stderr=True), quiet=False) as bar:
        yield bar


def _interactive() -> bool:
    if sys.stderr.isatty():
        return True
    notebook = "ipykernel" in sys.modules
    return notebook and importlib.util.find_spec("ipywidgets") is not None
