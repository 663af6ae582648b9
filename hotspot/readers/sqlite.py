"""Read nsys SQLite exports, schema 3.7 to 3.25; tables and columns may be missing.

Only kernels, their names, ranges and API calls are read. The export also holds the environment of
the profiled process, which is never read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from patcher.bench import UsageError
from patcher.hotspot.marks import STEP_WORDS
from patcher.hotspot.names import LONGEST, MODULE, is_whole, printable, row_name
from patcher.hotspot.owners import Calls, Ranges, around, between, owners, step_marks, with_steps
from patcher.hotspot.readers.arrow import read_columns, uri
from patcher.hotspot.readers.cards import Cards, read_cards
from patcher.hotspot.readers.content import first_line
from patcher.hotspot.readers.leftout import around_others, impossible, left_out
from patcher.hotspot.readers.ranges import RUNTIME, launching_calls, nvtx_ranges, row_ids
from patcher.hotspot.recording import Launches, Recording
from patcher.hotspot.timeline import Codes, Integers, by_start

HINT = "nsys export --type sqlite OUT.nsys-rep"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
MEMORY = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
NODE_LEVEL = (
    "nsys profile --cuda-graph-trace=node -t cuda,nvtx --sample=none --cpuctxsw=none "
    "-c cudaProfilerApi --capture-range-end=stop -o out PROGRAM"
)
UNTIMED = "CUPTI could not measure the time"
OVERLAPPING = "the time holds several later kernels of the same stream, which cannot be"
LONGER = 10
"""A launch at time 0 that is so many times longer than the longest other only lacks its start."""
_LATEST, _LONGEST = 1 << 61, 1 << 60
"""Limits of times in ns, which may count from 1970, and of what lies between them (36 years), so
that sums do not overflow."""


def read_sqlite(path: Path, window: str | None = None) -> Recording:
    """Read the kernels of an export.

    Args:
        path: the SQLite file.
        window: the text of NVTX ranges; only kernels launched inside them are read.

    Raises:
        UsageError: the file is no nsys export, damaged, still being written, without kernels, or
            without that window.
    """
    _check_complete(path)
    with _open(path) as database:
        # no views: a view can hide a query that never ends
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
        tables = {str(name) for (name,) in database.execute(query)}
        if not {KERNELS, "StringIds"} <= tables:
            raise UsageError(
                f"{path.name} {_what_it_is(tables)}", f"profile with -t cuda, then: {HINT}"
            )
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({KERNELS})")}
        rowids = row_ids(database, KERNELS)
        if rowids is None:
            raise UsageError(f"{path.name} holds no kernel", f"profile with -t cuda, then: {HINT}")
        launches, timed = _launches(database, path, columns, rowids)
        modules = nvtx_ranges(database, tables, MODULE + "%")
        named = nvtx_ranges(database, tables, *STEP_WORDS)
        marks = step_marks(named) if named else None
        wanted = nvtx_ranges(database, tables, _escaped(window)) if window is not None else None
        api_rows = row_ids(database, RUNTIME) if RUNTIME in tables else None
        if window is not None and wanted is None:
            raise UsageError(f"{path.name} has no NVTX range {window!r}", _ranges(database, tables))
        cards = read_cards(database, tables)
        if {"globalPid", "deviceId"} <= columns:
            cards = cards.told_apart(database, KERNELS, rowids)
        recording = Recording(
            source=f"nsys export {path.name}",
            memory=_memory(database, path, tables, cards),
            hidden=_hidden(database, tables),
            warnings=(
                *left_out("untimed", int((~timed).sum()), len(timed), "kernels", UNTIMED),
                *cards.warnings(),
            ),
        )
    if cards.ambiguous:
        processes = _join(path, columns, rowids)[1][timed]
        launches = replace(launches, device=cards.numbered(launches.device, processes))
    order = by_start(launches.start)
    launches = launches.chosen(order)
    if around_others(launches):
        call = _join(path, columns, rowids)[0][timed][order]
        wrong = impossible(launches, call)
        if wrong.any():
            launches = launches.chosen(~wrong)
            order = np.arange(len(timed))[timed][order][~wrong]
            timed = np.ones_like(timed)
            told = left_out("overlapping", int(wrong.sum()), len(wrong), "kernels", OVERLAPPING)
            recording = replace(recording, warnings=(*recording.warnings, *told))
    steps = None
    if modules or marks or wanted:
        calls = _calls(path, columns, rowids, api_rows, timed, order)
        if modules:
            launches = _by_module(launches, modules, around(modules, calls))
        if marks:
            owner = between(owners(marks.ranges, calls), launches.device, calls)
            launches, steps = with_steps(launches, owner, marks.phases)
        if wanted:
            inside = between(owners(wanted, calls), launches.device, calls) >= 0
            if not inside.any():
                message = f"{path.name} has no kernel launched inside {window!r}"
                raise UsageError(message, "give a range around the launches, or omit --window")
            launches = launches.chosen(inside)
    return replace(recording, launches=launches, steps=steps, **cards.of(launches.device))


def _what_it_is(tables: set[str]) -> str:
    """A database without kernels of nsys, in words."""
    if "StringIds" in tables:
        return "has no CUDA kernels"
    if any(table.startswith("rocpd_") for table in tables):
        return "is a database of rocprofv3, no nsys export; a torch.profiler trace is read on ROCm"
    if "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL" in tables:
        return "is a profile of nvprof, no nsys export"
    return "is no nsys export"


def _launches(
    database: sqlite3.Connection, path: Path, columns: set[str], rowids: tuple[int, int]
) -> tuple[Launches, NDArray[np.bool_]]:
    """The launches in the order of the file, and which of its rows have times.

    CUPTI writes zeros where it could not measure, and an end before the start where a capture
    stopped meanwhile.
    """
    name = next((c for c in ("demangledName", "shortName", "name") if c in columns), None)
    if name is None or not {"start", "end"} <= columns:
        raise UsageError(f"{path.name} has kernels without names or times", HINT)
    where = [f"IFNULL({c}, 0)" if c in columns else "0" for c in ("deviceId", "streamId")]
    place = f"{where[0]} << 32 | {where[1]}"  # one column is read faster than two
    kinds = (np.int32, np.int64, np.int64, np.int64)
    times = ('IFNULL(start, IFNULL("end", 0) + 1)', 'IFNULL("end", IFNULL(start, 1) - 1)')
    names, starts, ends, places = read_columns(path, KERNELS, rowids, (name, *times, place), kinds)
    if not len(starts):
        raise UsageError(f"{path.name} is damaged: its kernels cannot be read", HINT)
    timed = _timed(starts, ends)
    if not timed.any():
        raise UsageError(f"{path.name} has no kernel with a time: CUPTI measured none", HINT)
    if not timed.all():
        names, starts, ends, places = (column[timed] for column in (names, starts, ends, places))
    first, last = int(starts.min()), int(ends.max())
    long = last - first > _LONGEST or _sum(ends - starts) > _LONGEST
    if long or first < -_LATEST or last > _LATEST:
        raise UsageError(f"{path.name} has kernels with impossible times", HINT)
    codes, identifiers = _coded(names)
    texts = _strings(database, identifiers)
    return Launches(texts, codes, starts, ends, *_places(places)), timed


def _timed(starts: Integers, ends: Integers) -> NDArray[np.bool_]:
    """Which launches have both times, of which CUPTI writes 0 for one that it has not."""
    timed: NDArray[np.bool_] = ends >= starts
    zero = starts == 0
    if zero.any():
        longest = int((ends - starts)[timed & ~zero].max(initial=-1))
        timed &= ~zero | (ends > 0) & ((longest < 0) | (ends <= LONGER * longest))
    return timed


def _places(places: Integers) -> tuple[Codes, Codes]:
    """Devices and streams; if all launches share one, the arrays are broadcast."""
    if places.min() == places.max():
        both = np.int32(int(places[0]) >> 32), np.int64(places[0]).astype(np.int32)
        return np.broadcast_to(both[0], len(places)), np.broadcast_to(both[1], len(places))
    return (places >> 32).astype(np.int32), places.astype(np.int32)


def _sum(durations: Integers) -> float:
    return float(durations.sum(dtype=float))


def _coded(names: Integers) -> tuple[Codes, list[int]]:
    """(index of each name into the distinct identifiers, those identifiers)."""
    if names.min() >= 0 and names.max() < 10 * len(names) + 100_000:  # faster than sorting
        used = np.bincount(names) > 0
        index = (np.cumsum(used) - 1).astype(np.int32)
        return index[names], np.flatnonzero(used).tolist()
    identifiers, codes = np.unique(names, return_inverse=True)
    return codes.astype(np.int32), identifiers.tolist()


def _strings(database: sqlite3.Connection, identifiers: list[int]) -> tuple[str, ...]:
    """The names, truncated beyond any real length; equal truncated names stay distinct."""
    wanted = set(identifiers)
    query = f"SELECT id, substr(value, 1, {LONGEST}) FROM StringIds"
    names = {key: str(value) for key, value in database.execute(query) if key in wanted}
    return tuple(names.get(key, f"kernel {key}") for key in identifiers)


def _join(path: Path, columns: set[str], rowids: tuple[int, int]) -> list[Integers]:
    """Correlation and process of each kernel, in the order of the file; -1 where unknown."""
    join = [f"IFNULL({c}, -1)" if c in columns else "-1" for c in ("correlationId", "globalPid")]
    return read_columns(path, KERNELS, rowids, join, (np.int64, np.int64))


def _calls(
    path: Path,
    columns: set[str],
    rowids: tuple[int, int],
    api_rows: tuple[int, int] | None,
    timed: NDArray[np.bool_],
    order: Integers | slice,
) -> Calls:
    correlations, processes = (each[timed][order] for each in _join(path, columns, rowids))
    return launching_calls(path, api_rows, correlations, processes)


def _by_module(launches: Launches, modules: Ranges, around: Integers) -> Launches:
    """The launches with the row names of their modules (see `row_name`)."""
    texts = list(launches.texts)
    known = {text: index for index, text in enumerate(texts)}
    name, call = launches.name.copy(), np.full(len(around), -1, dtype=np.int64)
    kinds = {text: index for index, text in enumerate(sorted(set(modules.texts)))}
    kind = np.array([kinds[text] for text in modules.texts])[around]
    kind[around < 0] = -1
    for module, index in kinds.items():
        inside = kind == index
        if is_whole(module):
            call[inside] = around[inside]
        for code in np.unique(launches.name[inside]).tolist():
            row = row_name(module, texts[code])
            if row not in known:
                known[row] = len(texts)
                texts.append(row)
            name[inside & (launches.name == code)] = known[row]
    return replace(launches, texts=tuple(texts), name=name, call=call)


def _memory(
    database: sqlite3.Connection, path: Path, tables: set[str], cards: Cards
) -> Integers | None:
    parts = []
    process = ("globalPid",) if cards.ambiguous else ()
    for table in MEMORY:
        if table in tables and (rowids := row_ids(database, table)) is not None:
            columns = ("IFNULL(deviceId, 0)", "IFNULL(start, 0)", 'IFNULL("end", 0)', *process)
            device, *times = read_columns(path, table, rowids, columns, [np.int64] * len(columns))
            if process:
                device = cards.numbered(device.astype(np.int32), times.pop())
            parts.append(np.stack([device, *times], axis=1))
    if not parts:
        return None
    intervals = np.concatenate(parts)
    sound = (
        (intervals[:, 2] >= intervals[:, 1])
        & (intervals[:, 2] != 0)
        & (np.abs(intervals[:, 1:]) < _LATEST).all(axis=1)
    )
    result: Integers = intervals[sound]
    return result


def _hidden(database: sqlite3.Connection, tables: set[str]) -> str | None:
    """Whether kernels are missing because CUDA graphs were traced as a whole."""
    seen = 0
    if GRAPHS in tables:
        [seen] = database.execute(f"SELECT COUNT(*) FROM {GRAPHS}").fetchone()
    # graph level is the default of nsys, and harmless to a program that launches no graph
    if not seen and "META_DATA_CAPTURE" in tables and RUNTIME in tables:
        query = (
            f"SELECT COUNT(*) FROM {RUNTIME} r JOIN StringIds s ON s.id = r.nameId "
            "WHERE (s.value LIKE 'cudaGraphLaunch%' OR s.value LIKE 'cuGraphLaunch%') AND EXISTS ("
            "SELECT 1 FROM META_DATA_CAPTURE WHERE value = 'Graph' "
            "AND name LIKE '%CUDA_GRAPH_TRACE_OPTIONS:MODE')"
        )
        [seen] = database.execute(query).fetchone()
    if not seen:
        return None
    return (
        f"CUDA graphs were traced as a whole ({seen} launches of graphs), so the kernels inside "
        "them are missing"
    )


def _escaped(text: str) -> str:
    """Escape a range's text for LIKE, which ignores case."""
    return text.replace("%", "_")[:1000]


def _ranges(database: sqlite3.Connection, tables: set[str]) -> str:
    ranges = nvtx_ranges(database, tables, "%")
    names = sorted(set(ranges.texts))[:8] if ranges else []
    listed = ", ".join(printable(name[:40]) for name in names)
    return f"it has: {listed}" if names else "it has no NVTX ranges; omit --window"


def _check_complete(path: Path) -> None:
    """Compare the file's length with its header, since a truncated file can still answer queries.

    https://www.sqlite.org/fileformat2.html: page size at 16, change counter at 24, pages at 28.
    """
    for journal in (path.with_name(path.name + "-wal"), path.with_name(path.name + "-journal")):
        if journal.exists() and journal.stat().st_size:
            message = f"{path.name} is being written: {journal.name} exists beside it"
            raise UsageError(message, f"wait for the writer, or export again: {HINT}")
    with path.open("rb") as file:
        header = file.read(100)
    page = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    counted = header[24:28] == header[92:96]  # an old writer does not update the count
    if len(header) < 100 or (
        counted and path.stat().st_size < pages * (65536 if page == 1 else page)
    ):
        raise UsageError(f"{path.name} is cut off", f"copy it again, or export it again: {HINT}")


@contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(uri(path), uri=True)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield database
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # its messages quote bytes
        raise UsageError(
            f"{path.name} cannot be read as a database: {first_line(error)}",
            f"the file may be cut off; export it again: {HINT}",
        ) from error
