"""Read Nsight Compute (ncu) counters: its CSV pages, its summary per kernel, or a report.

The raw page is wide: one column per metric, units in the second line. The details page and the
summary are long: one row per metric. Lines of `==PROF==` and of the program come first. Units and
separators depend on options and locale, so both are parsed, never assumed.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from patcher.bench import UsageError, require_file
from patcher.hotspot.names import function_key, match_key, printable
from patcher.hotspot.ncu import raw_page
from patcher.hotspot.profile import Counters, ProfileWarning
from patcher.hotspot.readers.content import read_text
from patcher.hotspot.readers.ncu_metrics import (
    DETAILS,
    FIX,
    Cell,
    check_locale,
    is_wanted,
    measured,
)

MAX_TEXT = 256 << 20
"""Bytes; the raw page of `--set full` takes 30 KB per launch."""
_MOST_COLUMNS = 50_000
"""Limit of columns, over twenty times the 2,238 of `--set full` in ncu 2025.3."""
_REPORT_MAGIC = b"NVR\0"
_LABEL = ("Metric Name", "Metric Unit")


@dataclass
class _Launch:
    name: str
    weight: int = 1
    """Launches that the row represents."""
    capability: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)
    """Metrics by their names on the raw page."""


class MatchedCounters(NamedTuple):
    """Counters matched to the kernels of a profile."""

    counters: dict[str, Counters]
    """Counters by the profile's kernel names."""
    warnings: tuple[ProfileWarning, ...]
    """Counters that match no kernel or several."""


def read_ncu(path: Path) -> dict[str, Counters]:
    """Read counters by kernel name in ncu's spelling.

    Launches of one kernel are averaged, because the counters must explain the hotspot's mean time.

    Raises:
        UsageError: the file is no page of ncu, truncated, in another locale, or without a useful
            metric.
        MissingError: a report needs ncu, which is not installed.
    """
    if path.suffix == ".ncu-rep" or _head(path) == _REPORT_MAGIC:
        text = raw_page(path)
    else:
        text = read_text(path, MAX_TEXT, FIX)
    launches = _launches(text, path.name)
    merged: dict[str, list[tuple[int, Counters]]] = {}
    for launch in launches:
        values = measured(launch.cells, launch.capability, path.name)
        merged.setdefault(launch.name, []).append((launch.weight, values))
    result = {name: _mean(each) for name, each in merged.items()}
    if all(len(counters.model_fields_set) == 1 for counters in result.values()):
        message = f"{path.name} holds no duration, DRAM or throughput metric of any kernel"
        raise UsageError(message, FIX)
    return result


def attach(counters: dict[str, Counters], names: Iterable[str]) -> MatchedCounters:
    """Match counters to the kernels of a profile, which spells names differently.

    ncu omits namespaces, and with `--kernel-name-base function` templates too. Such a name is used
    only if it matches exactly one kernel.

    Args:
        counters: counters by ncu's kernel names.
        names: the profile's kernel names.
    """
    names = list(names)
    exact: dict[str, list[str]] = {}
    by_base: dict[str, list[str]] = {}
    for name in names:
        key = match_key(name)
        exact.setdefault(key, []).append(name)
        by_base.setdefault(function_key(name), []).append(name)
    matches: dict[str, list[tuple[int, Counters]]] = {}
    lost, unclear = [], []
    for spelled, each in counters.items():
        key = match_key(spelled)
        targets = exact.get(key, [])
        if not targets and ("<" not in key or any(map(_is_mangled, names))):
            targets = by_base.get(function_key(spelled), [])
        if len(targets) > 1:
            unclear.append(spelled)
        elif targets:
            matches.setdefault(targets[0], []).append((each.launches, each))
        else:
            lost.append(spelled)
    unused = ((lost, "no kernel of the profile"), (unclear, "more than one kernel of the profile"))
    warnings = tuple(
        ProfileWarning(
            kind="ncu_unmatched",
            message=f"Nsight Compute's {_some(which)} matched {what}; not used",
        )
        for which, what in unused
        if which
    )
    return MatchedCounters({name: _mean(each) for name, each in matches.items()}, warnings)


def _is_mangled(name: str) -> bool:
    return name.startswith("_Z")


def without_bytes(counters: Mapping[str, Counters]) -> list[ProfileWarning]:
    """Warn if no kernel has bytes or FLOPs, which the speed of light needs."""
    if not counters or any(c.dram_bytes or c.flops for c in counters.values()):
        return []
    shares = any(c.dram_throughput_pct or c.sm_throughput_pct for c in counters.values())
    has = "shares of the peak, which the table shows, but no" if shares else "no"
    message = (
        f"Nsight Compute's page has {has} bytes or FLOPs, so there is no speed of light: measure "
        "with --set full"
    )
    return [ProfileWarning(kind="ncu_no_bytes", message=message)]


def _some(names: list[str]) -> str:
    first = printable(names[0])[:80]
    return first if len(names) == 1 else f"{first} and {len(names) - 1} others"


def _head(path: Path) -> bytes:
    try:
        require_file(path)
        with path.open("rb") as file:
            return file.read(4)
    except OSError:
        return b""  # read_text reports the error


def _mean(each: list[tuple[int, Counters]]) -> Counters:
    """The mean of each counter over the launches that have it."""
    values: dict[str, float] = {}
    for name in sorted({name for _, one in each for name in one.model_fields_set} - {"launches"}):
        known = [
            (weight, getattr(one, name)) for weight, one in each if name in one.model_fields_set
        ]
        values[name] = sum(w * value for w, value in known) / sum(w for w, _ in known)
    return Counters.model_validate({"launches": sum(weight for weight, _ in each), **values})


def _launches(text: str, name: str) -> list[_Launch]:
    start = _header_at(text)
    if start is None:
        raise UsageError(f"{name} is no CSV page of Nsight Compute", FIX)
    # strict: an unclosed quote means a truncated file
    rows = csv.reader(io.StringIO(text[start:], newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(rows)]
        if len(header) > _MOST_COLUMNS:
            message = f"{name} has {len(header)} columns, so it is no page of Nsight Compute"
            raise UsageError(message, FIX)
        body = (row for row in rows if row and row != header and not _is_chatter(row, header))
        if "Metric Name" in header:
            launches = _long(header, body, name)
        else:
            launches = _wide(header, body, name)
    except (csv.Error, StopIteration) as error:
        message = f"{name} is truncated or not CSV ({error})"
        raise UsageError(message, FIX) from None
    if not launches:
        raise UsageError(f"{name} holds no kernel", FIX)
    return launches


def _header_at(text: str) -> int | None:
    """Where the table starts; its first two columns are the same on every page and version."""
    match = re.search(r'^"?(?:ID"?,"?)?Process ID"?,', text, re.MULTILINE)
    return match.start() if match else None


def _is_chatter(row: list[str], header: list[str]) -> bool:
    """Whether a line is output of ncu or the program: it starts neither with an ID nor empty."""
    return len(row) != len(header) and not re.fullmatch(r"\d*", row[0])


def _wide(header: list[str], rows: Iterator[list[str]], name: str) -> list[_Launch]:
    kernel = _column(header, "Kernel Name", name)
    capability = header.index("CC") if "CC" in header else None
    first = max(kernel, capability or 0) + 1
    wanted = [(i, metric) for i, metric in enumerate(header) if i >= first and is_wanted(metric)]
    units = next(rows, None)
    if units is None or len(units) != len(header) or units[kernel]:
        raise UsageError(f"{name} has no line of units below its header", FIX)
    launches: list[_Launch] = []
    written: list[str] = []
    """Numbers have units; texts and lists (`0,1,2`) have none."""
    for row in rows:
        if len(row) != len(header) or not row[kernel].strip():
            raise UsageError(f"{name} is cut off: a line is shorter than its header", FIX)
        launch = _Launch(row[kernel], capability=row[capability] if capability else "")
        launch.cells = {metric: Cell(row[i], units[i]) for i, metric in wanted}
        if len(launches) < 3:  # enough numbers to recognise the locale
            written += [row[i] for i in range(first, len(row)) if units[i]]
        launches.append(launch)
    used = [cell.text for each in launches for cell in each.cells.values()]
    check_locale(written, used, name)
    return launches


def _long(header: list[str], rows: Iterator[list[str]], name: str) -> list[_Launch]:
    kernel, metric, unit = (_column(header, each, name) for each in ("Kernel Name", *_LABEL))
    summary = "Average" in header
    value = _column(header, "Average" if summary else "Metric Value", name)
    count = _column(header, "Invocations", name) if summary else None
    capability = header.index("CC") if "CC" in header else None
    item = header.index("Body Item Label") if "Body Item Label" in header else None
    least = max(kernel, metric, unit, value, count or 0, capability or 0, item or 0) + 1
    # the columns before the section and the metric identify a launch
    before = [i for i in range(metric) if header[i] not in ("Section Name", "Body Item Label")]
    launches: dict[tuple[str, ...], _Launch] = {}
    written: list[str] = []
    for row in rows:
        if len(row) < least or not row[kernel].strip():
            raise UsageError(f"{name} is cut off: a line is shorter than its header", FIX)
        key = tuple(row[i] for i in before)
        if key not in launches:
            weight = row[count].replace(",", "") if count is not None else "1"
            if not re.fullmatch(r"[1-9]\d{0,9}", weight):
                raise UsageError(f"{name}: {weight[:20]!r} is not a number of invocations", FIX)
            launches[key] = _Launch(row[kernel], int(weight), row[capability] if capability else "")
        if not row[metric]:  # advice of a rule
            continue
        if row[unit]:
            written.append(row[value])
        label = DETAILS.get((row[metric], row[unit].endswith("%")), row[metric])
        # tables inside a section repeat a metric in another form
        if is_wanted(label) and not (item is not None and row[item]):
            launches[key].cells.setdefault(label, Cell(row[value], row[unit]))
    used = [cell.text for each in launches.values() for cell in each.cells.values()]
    check_locale(written, used, name)
    return list(launches.values())


def _column(header: list[str], title: str, name: str) -> int:
    if title not in header:
        raise UsageError(f"{name} has no column {title!r}, so it is another page of ncu", FIX)
    return header.index(title)
