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

from patcher.bench import UsageError
from patcher.hotspot.names import LONGEST, MODULE, is_whole, printable, row_name
from patcher.hotspot.profile import Gpu
from patcher.hotspot.readers.arrow import read_columns, uri
from patcher.hotspot.readers.content import first_line
from patcher.hotspot.readers.ranges import (
    RUNTIME,
    Calls,
    Ranges,
    launching_calls,
    nvtx_ranges,
    row_ids,
)
from patcher.hotspot.recording import Launches, Recording
from patcher.hotspot.timeline import Codes, Integers

HINT = "nsys export --type sqlite OUT.nsys-rep"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
MEMORY = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
NODE_LEVEL = (
    "nsys profile --cuda-graph-trace=node -t cuda,nvtx --sample=none --cpuctxsw=none "
    "-c cudaProfilerApi --capture-range-end=stop -o out PROGRAM"
)
STEPS = ("step", "ProfilerStep#%")
"""Ranges that name decode steps."""
_LATEST = 1 << 60
"""Limit of times in ns (36 years), so that sums do not overflow."""


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
            has = "has no CUDA kernels" if "StringIds" in tables else "is no nsys export"
            raise UsageError(f"{path.name} {has}", f"profile with -t cuda, then: {HINT}")
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({KERNELS})")}
        rowids = row_ids(database, KERNELS)
        if rowids is None:
            raise UsageError(f"{path.name} holds no kernel", f"profile with -t cuda, then: {HINT}")
        launches = _launches(database, path, columns, rowids)
        modules = nvtx_ranges(database, tables, MODULE + "%")
        steps = next((r for like in STEPS if (r := nvtx_ranges(database, tables, like))), None)
        wanted = nvtx_ranges(database, tables, _escaped(window)) if window else None
        api_rows = row_ids(database, RUNTIME) if RUNTIME in tables else None
        if window and wanted is None:
            raise UsageError(f"{path.name} has no NVTX range {window!r}", _ranges(database, tables))
        recording = Recording(
            source=f"nsys export {path.name}",
            memory=_memory(database, path, tables),
            gpu=_gpu(database, tables),
            hidden=_hidden(database, tables),
        )
    bounds = None
    if modules or steps or wanted:
        calls = _calls(path, columns, rowids, api_rows)
        if modules:
            launches = _by_module(launches, modules, modules.around(calls))
        if steps:
            bounds = _projected(launches, steps.during(calls))
        if wanted:
            inside = wanted.during(calls) >= 0
            if not inside.any():
                message = f"{path.name} has no kernel launched inside {window!r}"
                raise UsageError(message, "give a range around the launches, or omit --window")
            launches = launches.chosen(inside)
    return replace(recording, launches=launches.in_order(), steps=bounds)


def _launches(
    database: sqlite3.Connection, path: Path, columns: set[str], rowids: tuple[int, int]
) -> Launches:
    """The launches in the order of the file."""
    name = next((c for c in ("demangledName", "shortName", "name") if c in columns), None)
    if name is None or not {"start", "end"} <= columns:
        raise UsageError(f"{path.name} has kernels without names or times", HINT)
    where = [f"IFNULL({c}, 0)" if c in columns else "0" for c in ("deviceId", "streamId")]
    place = f"{where[0]} << 32 | {where[1]}"  # one column is read faster than two
    kinds = (np.int32, np.int64, np.int64, np.int64)
    names, starts, ends, places = read_columns(
        path, KERNELS, rowids, (name, "start", '"end"', place), kinds
    )
    if not len(starts):
        raise UsageError(f"{path.name} is damaged: its kernels cannot be read", HINT)
    if bool((ends < starts).any()):
        raise UsageError(f"{path.name} has kernels that end before they begin", HINT)
    if starts.min() < -_LATEST or ends.max() > _LATEST or _sum(ends - starts) > _LATEST:
        raise UsageError(f"{path.name} has kernels with impossible times", HINT)
    codes, identifiers = _coded(names)
    texts = _strings(database, identifiers)
    return Launches(texts, codes, starts, ends, *_places(places))


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


def _calls(
    path: Path, columns: set[str], rowids: tuple[int, int], api_rows: tuple[int, int] | None
) -> Calls:
    join = [f"IFNULL({c}, -1)" if c in columns else "-1" for c in ("correlationId", "globalPid")]
    correlations, processes = read_columns(path, KERNELS, rowids, join, (np.int64, np.int64))
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


def _projected(launches: Launches, step: Integers) -> Integers | None:
    """GPU time of each range, from its first kernel to the end of its last."""
    inside = step >= 0
    if not inside.any():
        return None
    numbers, which = np.unique(step[inside], return_inverse=True)
    begins = np.full(len(numbers), _LATEST)
    ends = np.full(len(numbers), -_LATEST)
    np.minimum.at(begins, which, launches.start[inside])
    np.maximum.at(ends, which, launches.end[inside])
    order = np.argsort(begins, kind="stable")
    return np.stack([begins[order], ends[order]], axis=1)


def _memory(database: sqlite3.Connection, path: Path, tables: set[str]) -> Integers | None:
    parts = []
    for table in MEMORY:
        if table in tables and (rowids := row_ids(database, table)) is not None:
            columns = ("IFNULL(deviceId, 0)", "start", '"end"')
            read = read_columns(path, table, rowids, columns, [np.int64] * 3)
            parts.append(np.stack(read, axis=1))
    if not parts:
        return None
    intervals = np.concatenate(parts)
    sound = (intervals[:, 2] >= intervals[:, 1]) & (np.abs(intervals[:, 1:]) < _LATEST).all(axis=1)
    result: Integers = intervals[sound]
    return result


def _gpu(database: sqlite3.Connection, tables: set[str]) -> Gpu | None:
    if "TARGET_INFO_GPU" not in tables:
        return None
    cursor = database.execute("SELECT * FROM TARGET_INFO_GPU LIMIT 1")
    names = [column[0] for column in cursor.description]
    row = dict(zip(names, next(iter(cursor), [None] * len(names)), strict=True))
    if not row.get("name"):
        return None
    major, minor = row.get("smMajor"), row.get("smMinor")
    return Gpu(
        name=printable(str(row["name"])[:100]),
        memory_bytes_per_s=_positive(row.get("memoryBandwidth")),
        multiprocessors=int(_positive(row.get("smCount")) or 0) or None,
        clock_hz=_positive(row.get("clockRate")),
        compute_capability=f"{major}.{minor}" if isinstance(major, int) else None,
    )


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e18 else None


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
