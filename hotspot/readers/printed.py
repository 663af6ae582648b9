"""Parse tables with one row per line: CSV, TSV, aligned columns, and columns between pipes.

nsys does not write standard CSV: it quotes a name only if it holds a comma, does not double inner
quotes and writes newlines raw. So lines are split from the left, where the numbers are, and the
rest of the line is the name. Lines rewritten by other programs, with quoted numbers, use `csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from patcher.hotspot.readers.cells import column, nanoseconds, number, whole

Style = Literal["csv", "tsv", "json", "html", "column", "pipe"]
Cells = tuple[str, ...]
Split = Callable[[str], Cells | None]

MAX_COLUMNS = 64
"""nsys writes at most 27; a line of a million commas is no header."""
MAX_ROWS = 200_000
"""A summary has hundreds of rows, a trace of one minute about 100,000."""
MAX_LINES = 50
"""Maximum lines of one name; only names of ranges contain line breaks."""
MAX_NAME = 1 << 17
"""Maximum length of a name. CUTLASS has names of 20,000 characters; the linker allows none this
long."""


@dataclass
class Table:
    """One printed table."""

    style: Style
    line: int
    """Line of its header, from 1."""
    columns: Cells
    """Headings as printed."""
    report: str | None = None
    """The report's name or heading printed before the table."""
    rows: list[tuple[int, Cells]] = field(default_factory=list)
    """(line, one cell per column); the last cell is the name as the source spells it."""
    damage: tuple[int, str] | None = None
    """Line and kind of the first damage; the rows end before it."""
    names: Cells = field(init=False)
    """Current column names in nsys, without units."""
    units: tuple[str | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = [column(cell) for cell in self.columns]
        self.names = tuple(name for name, _ in pairs)
        self.units = tuple(unit for _, unit in pairs)

    def add(self, line: int, cells: Cells) -> None:
        if len(self.rows) >= MAX_ROWS:
            self.fail(line, f"more than {MAX_ROWS} rows")
        elif len(cells[-1]) > MAX_NAME:
            self.fail(line, f"a name of {len(cells[-1])} characters")
        elif self.damage is None:
            self.rows.append((line, cells))

    def fail(self, line: int, what: str) -> None:
        self.damage = self.damage or (line, what)


# The first column of every report of nsys stats, and of the GUI's export
_FIRST = r"(?:Time|Total|Start|PID|Pid|API Start|NVTX Range|Range|Duration|Count)"
HEADER = re.compile(rf'[\s|]*["`*]*{_FIRST} ?(?:\([\w%/]+\)|%)?["`*]*\s*(?:[,\t|]| {{2,}}|\s[A-Z])')
_RULER = re.compile(r"\s*-+(?: +-+)+\s*")
_BORDER = re.compile(r"\s*[|+][-+:| ]*\s*")
CHATTER = re.compile(
    r"\s*(?:Processing \[|Generat(?:ing|ed)\b|NOTICE:|SKIPPED:|\[\d+/\d+\] |\*\* |```|~~~"
    r"|WARNING:|ERROR:|<h\d)"
)
NUMERIC = re.compile(r'\s*"?\d')
_EIGHT = ("Time (%)", "Total Time (ns)", "Instances", "Avg (ns)", "Med (ns)", "Min (ns)")
_WITHOUT_HEADER = (*_EIGHT, "Max (ns)", "StdDev (ns)", "Name")


def with_header(lines: Sequence[str], at: int) -> tuple[Table | None, int]:
    line = lines[at]
    if line.lstrip()[:1] == "|":
        cells = tuple(cell.strip() for cell in _pipes(line, MAX_COLUMNS))
        return _table("pipe", cells, lines, at, at + 1, lambda row: _pipe_row(row, len(cells)))
    following = lines[at + 1] if at + 1 < len(lines) else ""
    if _RULER.fullmatch(following):
        spans = [match.span() for match in re.finditer(r"-+", following[:MAX_NAME])]
        if len(spans) > MAX_COLUMNS:
            return None, at
        cells = _slices(line, spans) or tuple(re.split(r"\s{2,}", line.strip()))
        return _table("column", cells, lines, at, at + 2, lambda row: _column_row(row, spans))
    for separator, style in (("\t", "tsv"), (",", "csv")):
        if separator in line.strip():
            cells = tuple(cell.strip() for cell in line.split(separator, MAX_COLUMNS))
            kind: Style = "tsv" if style == "tsv" else "csv"
            cut = _delimited(len(cells), separator, column(cells[0])[0] == "NVTX Range")
            return _table(kind, cells, lines, at, at + 1, cut)
    cells = tuple(re.split(r"\s{2,}", line.strip()[:MAX_NAME]))
    return _table("column", cells, lines, at, at + 1, lambda row: _words(row, len(cells)))


def _table(
    style: Style, columns: Cells, lines: Sequence[str], at: int, first: int, split: Split
) -> tuple[Table | None, int]:
    """The table whose rows begin at `first`, and its last line."""
    if not 4 <= len(columns) < MAX_COLUMNS:
        return None, at
    table = Table(style, at + 1, columns)
    last = _fill(table, lines, first, split)
    return table, last


def without_header(lines: Sequence[str], at: int) -> tuple[Table | None, int]:
    """Parse a table printed with `nohdr`.

    It is accepted only if total = instances x average holds in each row and times have no
    decimals, which means that they are in ns.
    """
    size = len(_WITHOUT_HEADER)
    cut = _delimited(size, ",", False) if "," in lines[at].split(None, 1)[0] else None
    split = cut or (lambda row: _words(row, size))
    table = Table("csv" if cut else "column", at + 1, _WITHOUT_HEADER)
    last = _fill(table, lines, at, split)
    for line, cells in table.rows[:20]:
        try:
            (total, _), (mean, step) = nanoseconds(cells[1], 1), nanoseconds(cells[3], 1)
            instances = whole(cells[2])
            certain = abs(total - mean * instances) <= step * instances and step < 1
            certain &= all(number(cell) == whole(cell) for cell in (cells[1], *cells[5:7]))
        except ValueError:
            certain = False
        if not certain:
            table.rows.clear()
            table.fail(line, "the table has no header that names its columns")
    return table, last


def _fill(table: Table, lines: Sequence[str], first: int, split: Split) -> int:
    """Read rows from line `first` on; return the last line of the table."""
    pending: list[str] = []
    """Lines of the current row, since a name may hold newlines."""
    begin = first
    last = first - 1
    free = table.names[0] == "NVTX Range"

    def finish() -> None:
        if pending:
            cells = split("\n".join(pending))
            if cells is None:
                table.fail(begin + 1, "not a row of the table, or cut off")
            else:
                table.add(begin + 1, cells)

    at = first
    while at < len(lines) and table.damage is None:
        line = lines[at]
        if len(line) > 2 * MAX_NAME or len(pending) > MAX_LINES:
            table.fail(at + 1, "the line is too long for a report of nsys")
            break
        if not line.strip():
            at += 1
            ahead = next((x for x in lines[at : at + 3] if x.strip()), "")
            if free or not NUMERIC.match(ahead) or split(ahead) is None:
                break
            continue
        if CHATTER.match(line) or (HEADER.match(line) and not _open(table, pending)):
            break
        if table.style == "pipe" and line.lstrip()[:1] not in ("|", "+"):
            break
        if table.style == "pipe" and _BORDER.fullmatch(line):
            last = at
        elif not pending or _begins_row(table, line, pending, free):
            finish()
            pending, begin, last = [line], at, at
        elif table.style == "column" and not any(NUMERIC.match(x) for x in _until_blank(lines, at)):
            break  # prose follows
        else:
            pending.append(line)
            last = at
        at += 1
    finish()
    framed = table.style == "pipe" and "".join(lines[first : first + 1]).lstrip()[:1] == "+"
    if framed and lines[last].lstrip()[:1] != "+":
        table.fail(last + 1, "the table is cut off")
    return last


def _open(table: Table, pending: list[str]) -> bool:
    """Whether the row being read is inside a quoted name."""
    if table.style != "csv" or not pending:
        return False
    name = pending[0].split(",", len(table.columns) - 1)[-1]
    return name.startswith('"') and not (pending[-1].endswith('"') and name != '"')


def _until_blank(lines: Sequence[str], at: int) -> Iterator[str]:
    for line in lines[at : at + MAX_LINES]:
        if not line.strip() or CHATTER.match(line):
            return
        yield line


def _begins_row(table: Table, line: str, pending: list[str], free: bool) -> bool:
    """Whether a line starts a row rather than continuing the name before it."""
    if table.style in ("pipe", "column"):
        return table.style == "pipe" or free or NUMERIC.match(line) is not None
    separator = "," if table.style == "csv" else "\t"
    whole_row = line.count(separator) >= len(table.columns) - 1
    if _open(table, pending):
        return whole_row and (free or NUMERIC.match(line) is not None)
    closes = separator == "," and line.endswith('"') and pending[0].endswith('"')
    return whole_row or NUMERIC.match(line) is not None or (separator in line and not closes)


def _delimited(size: int, separator: str, free: bool) -> Split:
    """A splitter for CSV or TSV; with `free` the first column also holds free text."""

    def split(row: str) -> Cells | None:
        parts = row.split(separator) if free else row.split(separator, size - 1)
        if free:
            parts = _around_numbers(parts, size, separator)
        if len(parts) != size:
            return None
        if any(part.lstrip()[:1] == '"' for part in parts[0 if not free else 1 : -1]):
            try:
                record = next(csv.reader(io.StringIO(row, newline=""), delimiter=separator))
            except (csv.Error, StopIteration):
                return None
            return tuple(record) if len(record) == size else None
        name = _unquoted(parts[-1], separator)
        if name is None:
            return None
        return (_unquoted(parts[0], separator) or "", *parts[1:-1], name)

    return split


def _unquoted(cell: str, separator: str) -> str | None:
    """The cell without nsys's quotes; None if they are not closed."""
    if separator != "," or not cell.startswith('"'):
        return cell
    if len(cell) < 2 or not cell.endswith('"'):
        return None
    inner = cell[1:-1]
    doubled = '"' in inner and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if doubled else inner  # rewritten by another program


def _around_numbers(parts: list[str], size: int, separator: str) -> list[str]:
    """Split into range, style, numbers and name: the first run of numbers separates the texts."""
    run = size - 3
    for at in range(1, len(parts) - run - 1):
        middle = parts[at + 1 : at + 1 + run]
        if parts[at + run][:1] and all(_is_number(cell) for cell in middle):
            rest = parts[at + 1 + run :]
            return [separator.join(parts[:at]), parts[at], *middle, separator.join(rest)]
    return []


def _is_number(cell: str) -> bool:
    return not cell or cell.strip('"').replace(".", "", 1).isdigit()


def _words(row: str, size: int) -> Cells | None:
    parts = row.split(None, size - 1)
    return (*parts[:-1], parts[-1].rstrip()) if len(parts) == size else None


def _slices(row: str, spans: Sequence[tuple[int, int]]) -> Cells | None:
    """The cells below their rulers; None if there is text between two rulers."""
    reach = 0
    for begin, end in spans:
        if row[reach:begin].strip():
            return None
        reach = end
    cells = [row[begin:end].strip() for begin, end in spans[:-1]]
    return (*cells, row[spans[-1][0] :].strip())


def _column_row(row: str, spans: Sequence[tuple[int, int]]) -> Cells | None:
    cells = _slices(row, spans)
    if cells is None or not cells[-1]:  # pasted without its indentation
        return _words(row, len(spans))
    return cells


def _pipes(row: str, size: int) -> list[str]:
    return row.strip().removeprefix("|").removesuffix("|").split("|", size - 1)


def _pipe_row(row: str, size: int) -> Cells | None:
    cells = [cell.strip() for cell in _pipes(row, size)]
    if len(cells) != size or not row.rstrip().endswith("|"):
        return None
    name = cells[-1].replace("\\|", "|")
    return (*cells[:-1], name[1:-1] if len(name) > 2 and name[0] == name[-1] == "`" else name)
