"""Read the kernels of any report and format of `nsys stats` as a `Recording`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from patcher.bench import UsageError
from patcher.hotspot.profile import ProfileWarning
from patcher.hotspot.readers.cells import nanoseconds, whole
from patcher.hotspot.readers.sums import (
    HINT,
    Kind,
    of_another_locale,
    read_sums,
    table_units,
)
from patcher.hotspot.readers.tables import Table, tables
from patcher.hotspot.readers.traces import read_trace
from patcher.hotspot.recording import Recording, SummaryRow

__all__ = ["HINT", "kind_of", "read_summary"]

_KERNELS = Kind("cuda_gpu_kern_sum", "kernel summary", "Total Time", "Instances", "Name")
KINDS = (
    Kind("cuda_gpu_trace", "GPU trace", "Start", "Duration", "Strm", "Name"),
    Kind("cuda_kern_exec_trace", "kernel trace", "Kernel Start", "Kernel Dur", "Kernel Name"),
    _KERNELS,
    Kind("cuda_gpu_kern_gb_sum", "kernel summary by grid", "Instances", "GridXYZ", "Name"),
    Kind("nvtx_kern_sum", "kernel summary by range", "NVTX Range", "Kern Inst", "Kernel Name"),
    Kind("cuda_gpu_sum", "summary of GPU work", "Instances", "Category", "Operation"),
    Kind("cuda_kern_exec_sum", "kernel execution summary", "Count", "KAvg", "Kernel Name"),
)
"""In order of preference: times of launches, then complete summaries, then partial sums."""
_SUMMARY = {"Time", "Total Time", "Instances", "Avg", "Med", "Min", "Max", "StdDev", "Name"}
_OTHERS = (
    ("Num Calls", "an API summary"),
    ("GPU Ops", "an NVTX summary"),
    ("Style", "an NVTX summary"),
    ("Range", "an NVTX summary"),
    ("Operation", "a memory summary"),
    ("Source", "an MPI summary"),
    ("Result", "an API trace"),
)
_SEMICOLONS = re.compile(
    r"^\W{0,4}(?:Time|Total Time|Start|Instances|Duration)\b[^;\n]{0,20};[^\n]{0,999};\W?"
    r"(?:\w+ )?Name\W{0,3}$",
    re.MULTILINE,
)
"""A header, as a spreadsheet writes it where a comma comes before decimals."""
_LAUNCH = re.compile(r"cu(?:da)?Launch\w*Kernel")
HOST_BOUND = 2
"""The host bounds a run whose calls or ranges take so many times as long as its kernels."""
MAX_LINES = 500_000
"""Maximum lines of a text; `printed.MAX_ROWS` limits each table."""


def read_summary(text: str, name: str) -> Recording:
    """Read the kernels of a text printed by `nsys stats` or `nsys profile --stats=true`.

    Of several reports, the first of the most detailed kind is read: launches with times before
    sums. Times are as exact as printed; shares are never read.

    Args:
        text: the printed text.
        name: the file's name.

    Raises:
        UsageError: the text holds no report of kernels, or the report is damaged or truncated.
    """
    if "\0" in text:
        raise UsageError(f"{name} is a binary file, not output of nsys stats", HINT)
    if text.count("\n") > MAX_LINES:
        raise UsageError(f"{name} has more lines than any output of nsys stats", HINT)
    candidates = list(tables(text))
    kinds = [kind_of(table) for table in candidates]
    kind = next((kind for kind in KINDS if kind in kinds), None)
    if kind is None and _SEMICOLONS.search(text):
        raise of_another_locale(name, "semicolons between its columns")
    if kind is None:
        raise UsageError(f"{name} is {_what(candidates, text)}, not a kernel summary", HINT)
    chosen = [table for table, its in zip(candidates, kinds, strict=True) if its is kind]
    table = chosen[0]
    _check_whole(table, name, kind)
    source = f"nsys {kind.what} {name}"
    if kind.name.endswith("_trace"):
        recording = read_trace(table, source, name, kind)
    else:
        recording = read_sums(table, source, name, kind)
    launches = recording.launches
    if launches is not None:
        count, names = len(launches), launches.texts
    else:
        count = sum(row.instances for row in recording.rows)
        names = tuple(row.name for row in recording.rows)
    told = [*_warn_of_names(names), *_warn_of_several(chosen, name), *recording.warnings]
    if launches is None:
        told += _warn_of_host(candidates, recording.rows)
    return replace(
        recording,
        hidden=recording.hidden or _hidden(candidates, count),
        warnings=tuple(told),
    )


def kind_of(table: Table) -> Kind | None:
    """The kind of a table that holds kernels; None for another report."""
    names, last = set(table.names), table.names[-1]
    for kind in KINDS:
        if set(kind.columns) <= names and last == kind.columns[-1]:
            # sums of ranges, MPI calls and others have one more column than a summary
            return kind if kind is not _KERNELS or names <= _SUMMARY else _by_grid(names)
    return None


def _by_grid(names: set[str]) -> Kind | None:
    return KINDS[3] if names <= _SUMMARY | {"GridXYZ", "BlockXYZ"} else None


def _what(candidates: Iterable[Table], text: str) -> str:
    """A description of a text without kernels, for the error message."""
    kinds: list[str] = []
    for table in candidates:
        for column, what in _OTHERS:
            if any(column in name for name in table.names):
                kinds.append(what)
                break
        else:
            kinds.append("another report")
    if kinds:
        unlike = list(dict.fromkeys(kinds))
        return unlike[0] if len(unlike) == 1 else f"{', '.join(unlike[:-1])} and {unlike[-1]}"
    if "does not contain CUDA kernel data" in text:
        return "a report of a program without kernels"
    return "another text" if text.strip() else "empty"


def _check_whole(table: Table, name: str, kind: Kind) -> None:
    if table.damage is not None:
        line, what = table.damage
        message = f"{name}, line {line}: {what}"
        raise UsageError(message, f"the file may be cut off or changed; write it again: {HINT}")
    if not table.rows:
        raise UsageError(f"{name} holds a {kind.what} without kernels", HINT)


def _warn_of_several(chosen: Sequence[Table], name: str) -> list[ProfileWarning]:
    if len(chosen) == 1:
        return []
    lines = ", ".join(str(table.line) for table in chosen[:5])
    message = (
        f"{name} holds {len(chosen)} such reports (lines {lines}); only the first is read: put "
        "each in a separate file to read another"
    )
    return [ProfileWarning(kind="several_reports", message=message)]


def _warn_of_names(names: Iterable[str]) -> list[ProfileWarning]:
    names = list(names)
    warnings = []
    if any(name.endswith(("…", "...")) for name in names):
        message = "names are clipped, so kernels may share one; export as csv"
        warnings.append(ProfileWarning(kind="clipped_names", message=message))
    if any(re.match(r"_Z[NLK\d]", name) for name in names):
        message = "names are mangled, so few are recognised; use only --report cuda_gpu_kern_sum"
        warnings.append(ProfileWarning(kind="mangled_names", message=message))
    return warnings


def _warn_of_host(candidates: Sequence[Table], rows: Sequence[SummaryRow]) -> list[ProfileWarning]:
    """Warn if reports beside the kernels show that the host took much longer than they did."""
    spent = sum(row.total_ns for row in rows)
    calls = max((_total(t) for t in candidates if "Num Calls" in t.names), default=0)
    ranges = max((_total(t) for t in candidates if t.names[-1] == "Range"), default=0)
    whole = max(calls, ranges)
    if whole < HOST_BOUND * spent:
        return []
    beside = {"API calls": calls, "NVTX ranges": ranges}
    took = " and ".join(f"{what} {ns / 1e9:,.2f} s" for what, ns in beside.items() if ns)
    first = max(row.total_ns for row in rows)
    message = (
        f"kernels add up to {spent / 1e9:,.3f} s, but the same text's {took}: the host or launches "
        f"bound this run; a ceiling is a gain in kernel time, and end to end the first row gives "
        f"about {100 * first / (whole - first):.1f} %"
    )
    return [ProfileWarning(kind="host_bound", message=message)]


def _total(table: Table) -> int:
    """The sum of a report's times in ns; 0 if it is damaged or has none."""
    if table.damage is not None or "Total Time" not in table.names:
        return 0
    at = table.names.index("Total Time")
    unit = table_units(table)[at]
    try:
        return round(sum(nanoseconds(cells[at], unit)[0] for _, cells in table.rows))
    except ValueError:
        return 0


def _hidden(candidates: Iterable[Table], kernels: int) -> str | None:
    """Why the kernels of launched graphs seem to be missing; None if they are not.

    A graph traced node by node shows its kernels, so there are more kernels than launch calls. A
    graph traced as a whole shows none.
    """
    api = next((table for table in candidates if "Num Calls" in table.names), None)
    if api is None or api.damage is not None or api.names[-1] != "Name":
        return None
    graphs = singles = 0
    for _, cells in api.rows:
        try:
            calls = whole(cells[api.names.index("Num Calls")])
        except ValueError:
            return None
        graphs += calls if cells[-1].startswith(("cudaGraphLaunch", "cuGraphLaunch")) else 0
        singles += calls if _LAUNCH.match(cells[-1]) else 0
    if graphs == 0 or kernels - singles >= graphs:
        return None
    return (
        f"{graphs} CUDA graphs were launched, but their kernels were not recorded: only "
        f"{kernels} kernels are listed; profile with --cuda-graph-trace=node"
    )
