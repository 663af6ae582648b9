"""`nsys stats` kernel summaries as CSV.

nsys quotes a name only when it holds a comma and never doubles inner quotes, so lines are cut from
the left (numbers) and the rest is the name. The stream may begin with chatter and hold several
reports; only the kernel summary is read. Units come from the header, percentages are recomputed.
"""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

from bench import UsageError
from hotspot.profile import ProfileWarning
from hotspot.recording import Recording, SummaryRow

HINT = "nsys stats --report cuda_gpu_kern_sum --format csv OUT.nsys-rep > kernels.csv"
COLUMNS = ("Time (%)", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name")
_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9}
_OTHERS = {
    "Num Calls": "an API summary",
    "GridXYZ": "a kernel summary by grid and block",
    "Category": "a summary of all GPU work",
    "Operation": "a memory summary",
    "NVTX Range": "an NVTX summary",
    "API Name": "a kernel execution summary",
    "Style": "an NVTX summary",
}


def read_summary(text: str, name: str) -> Recording:
    """The first kernel summary in the text.

    Raises:
        UsageError: there is none, or a line of it does not fit.
    """
    lines = text.split("\n")  # splitlines would also cut names at \f, \x85 and their like
    lines = [line.removesuffix("\r") for line in lines]
    start = next((i for i, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise UsageError(f"{name} is {_what(lines)}, not a kernel summary", HINT)
    units = _header_units(lines[start], name)
    rows = []
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if not line.strip() or line.startswith(("Processing [", "Generating ", "NOTICE:")):
            break
        rows.append(_row(line, units, name, number))
    if not rows:
        raise UsageError(f"{name} holds a kernel summary without kernels", HINT)
    _check_complete(rows, text, name)
    warnings = []
    if any("…" in row.name for row in rows):
        message = "names are clipped, so kernels may share one; export as csv"
        warnings.append(ProfileWarning(kind="clipped_names", message=message))
    note = "a summary has no times: busy time and steps are unknown; the .sqlite export has them"
    warnings.append(ProfileWarning(kind="no_times", message=note))
    found = tuple(SummaryRow(*row[1:]) for row in rows)
    return Recording(f"nsys kernel summary {name}", rows=found, warnings=tuple(warnings))


class Row(NamedTuple):
    percent: float
    """As printed: one decimal."""
    name: str
    instances: int
    total_ns: int
    median_ns: float
    min_ns: int
    max_ns: int


def _check_complete(rows: list[Row], text: str, name: str) -> None:
    """A file cut between two lines still parses, but its printed percentages no longer add up."""
    rounding = 0.05 * len(rows) + 0.5
    if sum(row.percent for row in rows) < 100 - rounding:
        raise UsageError(f"{name} is cut off: its lines are less than the whole", f"again: {HINT}")


def _is_header(line: str) -> bool:
    cells = [cell.strip().strip('"') for cell in line.lstrip("\ufeff").split(",")]
    names = [re.sub(r" \((?!%).*\)$", "", cell) for cell in cells]
    return names == list(COLUMNS)


def _what(lines: list[str]) -> str:
    """What the file is instead, for the error."""
    for line in lines[:2000]:
        for column, what in _OTHERS.items():
            if column in line and "," in line:
                return what
    return "another file" if lines else "empty"


def _header_units(line: str, name: str) -> list[float]:
    """Nanoseconds per unit of the five duration columns."""
    units = []
    cells = [cell.strip().strip('"') for cell in line.split(",")]
    for cell in (cells[1], *cells[3:7]):
        found = re.search(r"\((\w+)\)$", cell)
        if found is None or found[1] not in _UNITS:
            raise UsageError(f"{name}: no known unit in column {cell!r}", HINT)
        units.append(_UNITS[found[1]])
    return units


def _row(line: str, units: list[float], name: str, number: int) -> Row:
    parts = line.split(",", len(COLUMNS) - 1)
    kernel = parts[-1]
    if line.startswith('"'):  # all quoted: some other program wrote it again, properly
        parts = next(csv.reader([line]))
        kernel = parts[-1]
    try:
        if len(parts) != len(COLUMNS):
            raise ValueError
        if kernel.startswith('"') and not line.startswith('"'):
            if len(kernel) < 3 or not kernel.endswith('"'):
                raise ValueError  # cut inside the name
            kernel = kernel[1:-1]
        percent = _number(parts[0])
        total, mean, median, least, most = (
            _number(cell) * unit for cell, unit in zip((parts[1], *parts[3:7]), units, strict=True)
        )
        instances = int(_number(parts[2]))
        if instances < 1 or min(total, mean, median, least, most) < 0 or not kernel.strip():
            raise ValueError
    except (ValueError, OverflowError):
        message = f"{name}, line {number}: not a line of a kernel summary"
        raise UsageError(message, f"the file may be cut off; write it again: {HINT}") from None
    return Row(percent, kernel, instances, round(total), median, round(least), round(most))


def _number(cell: str) -> float:
    value = float(cell.strip().replace(",", ""))
    if not abs(value) < 1e18:
        raise ValueError(cell)
    return value
