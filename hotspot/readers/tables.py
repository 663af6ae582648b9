"""Find the tables in a text of `nsys stats`, in any format, with other output around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from patcher.hotspot.readers.markup import html_table, json_table
from patcher.hotspot.readers.printed import (
    CHATTER,
    HEADER,
    NUMERIC,
    Table,
    with_header,
    without_header,
)

__all__ = ["Table", "tables"]

_REPORT = re.compile(
    r"\s*(?:Processing \[[^\]]*\] with \[(?:[^\]]*[/\\])?(?P<a>\w+)(?:\.py)?\]"
    r"|\[\d+/\d+\] Executing '(?P<b>[\w:-]+)'"
    r"|\*\* .*\((?P<c>\w+)(?:[^\w()][^()]*)?\):"
    r"|<h\d>.*\((?P<d>\w+)(?:[^\w()][^()]*)?\)</h\d>"
    r"|(?P<e>[A-Z][\w .()-]{3,70} (?:Statistics|Summary)[\w .()-]{0,30}):\s*$)"
)
_KERNELS = ("cuda_gpu_kern_sum", "gpukernsum")
MAX_TABLES = 1000
"""Maximum tables of one text, false starts included; nsys has about 30 reports."""


def tables(text: str) -> Iterator[Table]:
    """Yield the tables of a text in order, in linear time, without raising.

    Other text is skipped; a damaged table has `damage` set.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r\n", "\n")
    lines = text.split("\n")  # splitlines would also cut names at \f, \x85 and their like
    starts = _starts(lines) if "<table" in text or "[" in text else []
    report: str | None = None
    at = tried = 0
    while at < len(lines) and tried < MAX_TABLES:
        line = lines[at]
        table: Table | None = None
        last = at
        stripped = line.strip()
        if not stripped:
            pass
        elif CHATTER.match(line) or stripped.endswith(":"):
            report = report_name(line) or report
        elif stripped[0] == "[" and re.fullmatch(r"\[(?:\s*\{.*)?", stripped):
            tried += 1
            table, last = json_table(text, lines, starts, at)
        elif "<table" in line:
            tried += 1
            table, last = html_table(text, lines, starts, at)
        elif HEADER.match(line):
            tried += 1
            table, last = with_header(lines, at)
        elif report in _KERNELS and NUMERIC.match(line):
            tried += 1
            table, last = without_header(lines, at)
        if table is not None:
            table.report = report
            yield table
            report = None
        at = last + 1


def _starts(lines: list[str]) -> list[int]:
    """The offset of each line."""
    return list(accumulate(map((1).__add__, map(len, lines)), initial=0))


def report_name(line: str) -> str | None:
    """The report that a line of output announces: `cuda_gpu_kern_sum`, or an old heading."""
    match = _REPORT.match(line[:2000])
    if match is None:
        return None
    return next((match[group] for group in "abcde" if match[group]), None)
