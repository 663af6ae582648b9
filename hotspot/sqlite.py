"""nsys SQLite exports, schema 3.7 to 3.25: columns by PRAGMA, tables may be missing.

Only kernels, their names, ranges and API calls are read: the export also holds the environment of
the profiled process, which never leaves it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from bench import UsageError
from hotspot.names import is_whole, row_name
from hotspot.profile import KernelStat, Profile, ProfileWarning
from hotspot.ranges import RUNTIME, launching_modules, nvtx_ranges
from hotspot.rank import build_profile, kernel_stat

HINT = "nsys export --type sqlite OUT.nsys-rep"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NODE_LEVEL = (
    "nsys profile --cuda-graph-trace=node -t cuda,nvtx --sample=none --cpuctxsw=none "
    "-c cudaProfilerApi --capture-range-end=stop -o out PROGRAM"
)
_LATEST = 1 << 60
"""36 years in nanoseconds: sums of what lies below do not overflow."""

Integers = NDArray[np.int64]


def read_sqlite(path: Path, model: str) -> Profile:
    """Kernels of an export, with busy time and steps.

    Raises:
        UsageError: not a database, damaged, locked, of something else, or without kernels.
    """
    _check_complete(path)
    with _open(path) as database:
        # tables only: a view can hide a query that never ends
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables = {str(name) for (name,) in database.execute(query)}
        if not {KERNELS, "StringIds"} <= tables:
            has = "has no CUDA kernels" if "StringIds" in tables else "is no nsys export"
            raise UsageError(f"{path.name} {has}", f"profile with -t cuda, then: {HINT}")
        names, starts, ends, correlations, processes = _kernels(database, path)
        strings = _strings(database, set(np.unique(names).tolist()))
        modules, texts = launching_modules(database, tables, correlations, processes)
        steps = _steps(database, tables, names, ends - starts)
        warnings = list(_warnings(database, tables))
    if steps is None:
        note = "decode steps cannot be told: neither `step` ranges nor one graph launch a step"
        warnings.append(ProfileWarning(kind="steps_unknown", message=note))
    kernels = _rows(names, ends - starts, strings, modules, texts)
    busy = busy_time(starts, ends)
    return build_profile(model, f"nsys export {path.name}", kernels, busy, steps, warnings)


def _rows(
    names: Integers,
    durations: Integers,
    strings: dict[int, str],
    modules: Integers,
    texts: list[str],
) -> list[KernelStat]:
    """One row a kernel; what runs inside a norm is one row, counted by the norm's calls."""
    found: dict[str, list[Integers]] = {}
    for module, chosen in _by_module(modules, texts):
        if module is not None and is_whole(module):
            _, call = np.unique(modules[chosen], return_inverse=True)
            spent = np.bincount(call, weights=durations[chosen]).astype(np.int64)
            found.setdefault(module, []).append(spent)
        else:
            for identifier, spent in _grouped(names[chosen], durations[chosen]):
                name = strings.get(identifier, f"kernel {identifier}")
                found.setdefault(row_name(module, name), []).append(spent)
    whole = int(durations.sum())
    rows = [(name, np.concatenate(parts)) for name, parts in found.items()]
    return [
        kernel_stat(
            name,
            len(each),
            int(each.sum()),
            whole,
            float(np.median(each)),
            int(each.min()),
            int(each.max()),
        )
        for name, each in rows
    ]


def _by_module(modules: Integers, texts: list[str]) -> Iterator[tuple[str | None, Any]]:
    """(text of the range, mask of the kernels launched in it); None: in no range."""
    if not texts:
        yield None, slice(None)
        return
    place = {text: index for index, text in enumerate(sorted(set(texts)))}
    where = np.array([place[text] for text in texts])[modules]
    where[modules < 0] = -1
    for text, index in ((None, -1), *place.items()):
        chosen = where == index
        if chosen.any():
            yield text, chosen


def _grouped(keys: Integers, values: Integers) -> Iterator[tuple[int, Integers]]:
    order = np.argsort(keys, kind="stable")
    unique, begins = np.unique(keys[order], return_index=True)
    yield from zip(unique.tolist(), np.split(values[order], begins[1:]), strict=True)


def busy_time(starts: Integers, ends: Integers) -> int:
    """Length of the union of the intervals, in the unit of its arguments."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    begin, end = starts[order], np.maximum.accumulate(ends[order])
    # an interval opens a new stretch where it begins after all earlier ones have ended
    fresh = np.concatenate(([True], begin[1:] > end[:-1]))
    first = np.flatnonzero(fresh)
    last = np.concatenate((first[1:] - 1, [len(begin) - 1]))
    return int((end[last] - begin[first]).sum())


def _check_complete(path: Path) -> None:
    """A cut file can still answer queries: hold its length against the pages its header promises.

    https://www.sqlite.org/fileformat2.html: page size at 16, change counter at 24, pages at 28.
    """
    with path.open("rb") as file:
        header = file.read(100)
    page = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    counted = header[24:28] == header[92:96]  # else a writer too old to keep the count
    if len(header) < 100 or (
        counted and path.stat().st_size < pages * (65536 if page == 1 else page)
    ):
        raise UsageError(f"{path.name} is cut off", f"copy it again, or export it again: {HINT}")


@contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    """Read-only and immutable: nothing is locked, changed or left beside the file."""
    uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield database
    except (sqlite3.Error, OverflowError) as error:
        raise UsageError(
            f"{path.name} cannot be read as a database: {error}",
            f"the file may be cut off; export it again: {HINT}",
        ) from error


def _kernels(
    database: sqlite3.Connection, path: Path
) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """Name ids, starts, ends, correlation ids and processes, a row a launch."""
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({KERNELS})")}
    name = next((c for c in ("demangledName", "shortName", "name") if c in columns), None)
    if name is None or not {"start", "end"} <= columns:
        raise UsageError(f"{path.name} has kernels without names or times", HINT)
    join = ("correlationId", "globalPid")
    joined = [f"IFNULL({column}, -1)" if column in columns else "-1" for column in join]
    query = f'SELECT {name}, start, "end", {", ".join(joined)} FROM {KERNELS}'
    rows: Any = database.execute(query)
    try:
        flat = np.fromiter((cell for row in rows for cell in row), dtype=np.int64)
    except (TypeError, ValueError):
        raise UsageError(f"{path.name} has kernels whose times are no numbers", HINT) from None
    table = flat.reshape(-1, 5)
    if not len(table):
        raise UsageError(f"{path.name} holds no kernel", f"profile with -t cuda, then: {HINT}")
    starts, ends = table[:, 1], table[:, 2]
    if bool((ends < starts).any()):
        raise UsageError(f"{path.name} has kernels that end before they begin", HINT)
    if (
        starts.min() < -_LATEST
        or ends.max() > _LATEST
        or float((ends - starts).sum(dtype=float)) > _LATEST
    ):
        raise UsageError(f"{path.name} has kernels whose times cannot be", HINT)
    return table[:, 0], starts, ends, table[:, 3], table[:, 4]


def _strings(database: sqlite3.Connection, wanted: set[int]) -> dict[int, str]:
    rows = database.execute("SELECT id, value FROM StringIds")
    return {key: str(value) for key, value in rows if key in wanted}


def _steps(
    database: sqlite3.Connection, tables: set[str], names: Integers, durations: Integers
) -> int | None:
    """Decode steps: `step` ranges where the program has them, else graph launches.

    A step may launch several graphs, so launches count only where they divide the launches of
    the kernels that hold nine tenths of the time.
    """
    if ranges := len(nvtx_ranges(database, tables, "step")):
        return ranges
    launches = _graph_launches(database, tables)
    if not launches:
        return None
    _, kernel, counts = np.unique(names, return_inverse=True, return_counts=True)
    fits = counts % launches == 0
    total = int(durations.sum())
    return launches if int(durations[fits[kernel]].sum()) >= 0.9 * total else None


def _graph_launches(database: sqlite3.Connection, tables: set[str]) -> int:
    if RUNTIME not in tables:
        return 0
    query = (
        f"SELECT COUNT(*) FROM {RUNTIME} r JOIN StringIds s ON s.id = r.nameId "
        "WHERE s.value LIKE 'cudaGraphLaunch%' OR s.value LIKE 'cuGraphLaunch%'"
    )
    [launches] = database.execute(query).fetchone()
    return int(launches)


def _warnings(database: sqlite3.Connection, tables: set[str]) -> Iterator[ProfileWarning]:
    hidden = 0
    if GRAPHS in tables:
        [hidden] = database.execute(f"SELECT COUNT(*) FROM {GRAPHS}").fetchone()
    # graph level is the default of nsys, and harmless to a program that launches no graph
    if not hidden and "META_DATA_CAPTURE" in tables and _graph_launches(database, tables):
        query = (
            "SELECT COUNT(*) FROM META_DATA_CAPTURE "
            "WHERE name LIKE '%CUDA_GRAPH_TRACE_OPTIONS:MODE' AND value = 'Graph'"
        )
        [hidden] = database.execute(query).fetchone()
    if hidden:
        yield ProfileWarning(
            kind="graph_level",
            message="CUDA graphs were traced as a whole: the kernels inside them are missing and "
            f"this ranking is of what is left; profile again: {NODE_LEVEL}",
        )
