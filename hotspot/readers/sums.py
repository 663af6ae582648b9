"""Read the rows of a summary printed by `nsys stats`: units, precision, sums by kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal

from patcher.bench import UsageError
from patcher.hotspot.profile import ProfileWarning
from patcher.hotspot.readers.cells import UNITS, is_foreign, nanoseconds, percent, whole
from patcher.hotspot.readers.tables import Table
from patcher.hotspot.recording import Recording, SummaryRow

HINT = "nsys stats --report cuda_gpu_kern_sum --format csv OUT.nsys-rep > kernels.csv"
_RANGE = re.compile(r", (?:seq|op_id) = \d+(?:, (?:seq|op_id|sizes|input_op_ids) = [^/]*)?/")
_BRACKETS = re.compile(r"[()<>\[\]{}/]")


class Kind:
    """A report of kernels and the columns that identify it; the last one holds the names."""

    def __init__(self, name: str, what: str, *columns: str) -> None:
        self.name, self.what, self.columns = name, what, columns


@dataclass
class _Sum:
    """One row, or the sum of several rows of one kernel."""

    name: str
    instances: int
    total: Decimal
    median: Decimal | None
    least: Decimal | None
    most: Decimal | None

    def add(self, other: _Sum) -> None:
        self.instances += other.instances
        self.total += other.total
        self.median = None  # unknown from two medians
        self.least = None if None in (a := (self.least, other.least)) else min(_known(*a))
        self.most = None if None in (a := (self.most, other.most)) else max(_known(*a))

    def row(self) -> SummaryRow:
        return SummaryRow(
            name=self.name,
            instances=self.instances,
            total_ns=_integer(self.total),
            median_ns=None if self.median is None else float(self.median),
            min_ns=None if self.least is None else _integer(self.least),
            max_ns=None if self.most is None else _integer(self.most),
        )


def read_sums(table: Table, source: str, name: str, kind: Kind) -> Recording:
    """Read the kernels of a summary; times are rounded to whole ns.

    A report may have several rows per kernel (by grid, range or thread), which are added up. Their
    minimum and maximum combine, but their median is unknown. Truncated names are not merged.

    Raises:
        UsageError: a row is malformed, or rows are missing.
    """
    units = table_units(table)
    step = Decimal(0)
    sums: list[_Sum] = []
    where = {column: at for at, column in enumerate(table.names)}
    ranged = False
    for line, cells in table.rows:
        if kind.name == "cuda_gpu_sum" and cells[where["Category"]] != "CUDA_KERNEL":
            continue
        try:
            one, precision = _sum(cells, where, units, kind)
        except ValueError:
            raise not_a_row(name, line, kind, cells) from None
        step = max(step, precision)
        bare = without_range(one.name)
        ranged |= bare != one.name
        one.name = bare
        sums.append(one)
    if not sums:
        raise UsageError(f"{name} holds a {kind.what} without kernels", HINT)
    warnings = _check_complete(table, name, kind)
    if ranged:
        message = "ranges before the names (:nvtx-name) were removed, rows of one kernel added up"
        warnings.append(ProfileWarning(kind="nvtx_names", message=message))
    warnings += [*_warn_of_ranges(table, kind), *warn_of_launches(kind), *warn_of_step(step)]
    message = "a summary has no times: busy time and steps are unknown; the .sqlite has them"
    warnings.append(ProfileWarning(kind="no_times", message=message))
    if ranged or kind.name != "cuda_gpu_kern_sum":
        sums = _merged(sums)
    return Recording(source, rows=tuple(one.row() for one in sums), warnings=tuple(warnings))


def table_units(table: Table) -> list[int | None]:
    """Nanoseconds per unit of each column; old reports name the unit in only one heading."""
    shared = next((unit for unit in table.units if unit in UNITS), None)
    return [UNITS.get(unit or shared or "") for unit in table.units]


def not_a_row(name: str, line: int, kind: Kind, cells: tuple[str, ...]) -> UsageError:
    foreign = next((cell for cell in cells[:-1] if is_foreign(cell)), None)
    if foreign is not None:
        return of_another_locale(name, f"line {line}: {foreign.strip()}")
    message = f"{name}, line {line}: not a line of a {kind.what}"
    return UsageError(message, f"the file may be cut off or changed; write it again: {HINT}")


def of_another_locale(name: str, what: str) -> UsageError:
    """The error for numbers of which nobody can tell what a point or a comma means."""
    return UsageError(f"{name} has numbers of another locale ({what})", f"LC_ALL=C {HINT}")


def warn_of_launches(kind: Kind) -> list[ProfileWarning]:
    """Warn if a report omits kernels whose launch was not recorded."""
    if "kern_exec" not in kind.name:
        return []
    message = "only kernels whose launch was recorded are listed; cuda_gpu_kern_sum lists all"
    return [ProfileWarning(kind="recorded_launches", message=message)]


def warn_of_step(step: Decimal) -> list[ProfileWarning]:
    """Warn if times are printed too coarsely for kernels of microseconds."""
    if step <= 1:
        return []
    message = (
        f"times are printed in steps of {step.normalize():f} ns; print them with --timeunit ns"
    )
    return [ProfileWarning(kind="rounded_times", message=message)]


def without_range(name: str) -> str:
    """A kernel's name without the range that `:nvtx-name` puts before it.

    The range is recognised in two cases: PyTorch's `, op_id = 7/`, and a slash outside all
    brackets. No kernel name has such a slash except `operator/`. Otherwise the name is unchanged.
    """
    if "/" not in name:
        return name
    if (match := _RANGE.search(name)) is not None and match.end() < len(name):
        return name[match.end() :]
    depth = 0
    for token in reversed(list(_BRACKETS.finditer(name))):
        mark, at = token[0], token.start()
        if mark == ">" and name[at - 1 : at] == "-":
            continue
        if mark == "/":
            if depth == 0 and at + 1 < len(name) and not name[:at].endswith("operator"):
                return name[at + 1 :]
        elif mark in ")>]}":
            depth += 1
        else:
            depth -= 1
            if depth < 0:
                return name
    return name


def _sum(
    cells: tuple[str, ...], where: dict[str, int], units: list[int | None], kind: Kind
) -> tuple[_Sum, Decimal]:
    """Parse one row; return it and the precision of its total in ns."""

    def time(column: str) -> tuple[Decimal, Decimal] | None:
        at = where.get(column)
        return None if at is None or not cells[at] else nanoseconds(cells[at], units[at])

    prefix = "K" if kind.name == "cuda_kern_exec_sum" else ""
    count = {"nvtx_kern_sum": "Kern Inst", "cuda_kern_exec_sum": "Count"}.get(kind.name)
    instances = whole(cells[where[count or "Instances"]])
    mean = time(f"{prefix}Avg")
    total = time("Total Time") if not prefix else mean and (mean[0] * instances, mean[1])
    if total is None or instances < 1 or not cells[-1].strip():
        raise ValueError
    if mean and abs(total[0] - mean[0] * instances) > _slack(total, mean, instances):
        raise ValueError  # a digit is damaged, or columns are shifted
    median, least, most = (time(prefix + column) for column in ("Med", "Min", "Max"))
    one = _Sum(
        cells[-1],
        instances,
        total[0],
        median and median[0],
        least and least[0],
        most and most[0],
    )
    return one, total[1]


def _slack(
    total: tuple[Decimal, Decimal], mean: tuple[Decimal, Decimal], instances: int
) -> Decimal:
    """The tolerance between instances x average and the total: rounding, plus 1 %."""
    return mean[1] * instances + total[1] + total[0] / 100


def _merged(sums: list[_Sum]) -> list[_Sum]:
    merged: dict[str | int, _Sum] = {}
    for position, one in enumerate(sums):
        key = position if one.name.endswith("…") else one.name
        if key in merged:
            merged[key].add(one)
        else:
            merged[key] = one
    return list(merged.values())


def _check_complete(table: Table, name: str, kind: Kind) -> list[ProfileWarning]:
    """Check that the printed shares add up, since a file truncated between two lines still parses.

    An incomplete file is refused. Pasted text and the GUI's export are often shortened on purpose,
    so for those there is a warning.
    """
    at = next((i for i, column in enumerate(table.names) if column == "Time"), None)
    if at is None:
        return []
    total = 0.0
    by_gui = False
    for line, cells in table.rows:
        try:
            total += percent(cells[at])
            by_gui |= cells[at].endswith("%")
        except ValueError:
            raise not_a_row(name, line, kind, cells) from None
    if total >= 100 - (0.05 * len(table.rows) + 0.5):
        return []
    what = f"its rows are only {total:.1f} % of the whole"
    if table.style not in ("column", "pipe") and not by_gui:
        raise UsageError(f"{name} is cut off: {what}", f"write it again: {HINT}")
    message = f"{what}: the rest is missing, so every share is too large"
    return [ProfileWarning(kind="incomplete", message=message)]


def _warn_of_ranges(table: Table, kind: Kind) -> list[ProfileWarning]:
    if kind.name != "nvtx_kern_sum":
        return []
    at = table.names.index("NVTX Range")
    ranges = {cells[at] for _, cells in table.rows if cells[at]}
    if len(ranges) < 2:
        return []  # nothing can be counted twice
    message = (
        f"kernels are added up over {len(ranges)} NVTX ranges; one that ran inside several of them "
        "counts in each: cuda_gpu_kern_sum counts it once"
    )
    return [ProfileWarning(kind="ranges", message=message)]


def _known(*values: Decimal | None) -> list[Decimal]:
    return [value for value in values if value is not None]


def _integer(value: Decimal) -> int:
    return int(value.to_integral_value(ROUND_HALF_EVEN))
