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
from hotspot.profile import Profile, ProfileWarning
from hotspot.rank import build_profile, kernel_stat

HINT = "nsys export --type sqlite OUT.nsys-rep"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NODE_LEVEL = (
    "nsys profile --cuda-graph-trace=node -t cuda,nvtx --sample=none --cpuctxsw=none "
    "-c cudaProfilerApi --capture-range-end=stop -o out PROGRAM"
)


def read_sqlite(path: Path, model: str) -> Profile:
    """Kernels of an export, with busy time and steps.

    Raises:
        UsageError: not a database, damaged, locked, of something else, or without kernels.
    """
    with _open(path) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not {KERNELS, "StringIds"} <= tables:
            has = "has no CUDA kernels" if "StringIds" in tables else "is no nsys export"
            raise UsageError(f"{path.name} {has}", f"profile with -t cuda, then: {HINT}")
        names, starts, ends = _kernels(database, path)
        strings = _strings(database, set(np.unique(names).tolist()))
        steps = _steps(database, tables)
        warnings = list(_warnings(database, tables))
    durations = ends - starts
    whole = int(durations.sum())
    order = np.lexsort((durations, names))
    ids, begins = np.unique(names[order], return_index=True)
    kernels = []
    for identifier, group in zip(ids.tolist(), np.split(durations[order], begins[1:]), strict=True):
        kernels.append(
            kernel_stat(
                strings.get(identifier, f"kernel {identifier}"),
                len(group),
                int(group.sum()),
                whole,
                float(np.median(group)),
                int(group[0]),
                int(group[-1]),
            )
        )
    if steps is None:
        note = "decode steps cannot be told: no graph launches and no `step` ranges"
        warnings.append(ProfileWarning(kind="steps_unknown", message=note))
    busy = busy_time(starts, ends)
    return build_profile(model, f"nsys export {path.name}", kernels, busy, steps, warnings)


def busy_time(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
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
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({KERNELS})")}
    name = next((c for c in ("demangledName", "shortName", "name") if c in columns), None)
    if name is None or not {"start", "end"} <= columns:
        raise UsageError(f"{path.name} has kernels without names or times", HINT)
    rows: Any = database.execute(f'SELECT {name}, start, "end" FROM {KERNELS}')
    try:
        flat = np.fromiter((cell for row in rows for cell in row), dtype=np.int64)
    except (TypeError, ValueError):
        raise UsageError(f"{path.name} has kernels whose times are no numbers", HINT) from None
    table = flat.reshape(-1, 3)
    if not len(table):
        raise UsageError(f"{path.name} holds no kernel", f"profile with -t cuda, then: {HINT}")
    if bool((table[:, 2] < table[:, 1]).any()):
        raise UsageError(f"{path.name} has kernels that end before they begin", HINT)
    return table[:, 0], table[:, 1], table[:, 2]


def _strings(database: sqlite3.Connection, wanted: set[int]) -> dict[int, str]:
    rows = database.execute("SELECT id, value FROM StringIds")
    return {key: str(value) for key, value in rows if key in wanted}


def _steps(database: sqlite3.Connection, tables: set[str]) -> int | None:
    """Decode steps: `step` ranges where the program has them, else graph launches."""
    if "NVTX_EVENTS" in tables:
        query = "SELECT COUNT(*) FROM NVTX_EVENTS WHERE text = 'step'"
        [ranges] = database.execute(query).fetchone()
        if ranges:
            return int(ranges)
    if RUNTIME in tables:
        query = (
            f"SELECT COUNT(*) FROM {RUNTIME} r JOIN StringIds s ON s.id = r.nameId "
            "WHERE s.value LIKE 'cudaGraphLaunch%' OR s.value LIKE 'cuGraphLaunch%'"
        )
        [launches] = database.execute(query).fetchone()
        if launches:
            return int(launches)
    return None


def _warnings(database: sqlite3.Connection, tables: set[str]) -> Iterator[ProfileWarning]:
    hidden = 0
    if GRAPHS in tables:
        [hidden] = database.execute(f"SELECT COUNT(*) FROM {GRAPHS}").fetchone()
    if not hidden and "META_DATA_CAPTURE" in tables:
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
