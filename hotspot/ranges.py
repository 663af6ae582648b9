"""Which module launched a kernel: the innermost `module::` NVTX range around its launch."""

from __future__ import annotations

import sqlite3

import numpy as np
from numpy.typing import NDArray

from hotspot.names import MODULE

NVTX = "NVTX_EVENTS"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
Range = tuple[int, int, int, str]
"""globalTid, start, end, text."""
_PROCESS = ~0xFFFFFF
"""Masks a globalTid to its globalPid: correlation ids repeat between processes."""


def nvtx_ranges(database: sqlite3.Connection, tables: set[str], like: str) -> list[Range]:
    """Closed ranges whose text is LIKE that, by thread and start, outer before inner.

    The text is in `text`, or a string that `textId` names.
    """
    if NVTX not in tables:
        return []
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({NVTX})")}
    if not {"text", "start", "end", "globalTid"} <= columns:
        return []
    said, join = "n.text", ""
    if "textId" in columns:
        said, join = "COALESCE(n.text, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
    query = (
        f'SELECT n.globalTid, n.start, n."end", {said} FROM {NVTX} n {join} '
        f'WHERE {said} LIKE ? AND n."end" IS NOT NULL ORDER BY 1, 2, 3 DESC'
    )
    return database.execute(query, (like,)).fetchall()


def launching_modules(
    database: sqlite3.Connection,
    tables: set[str],
    correlations: NDArray[np.int64],
    processes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], list[str]]:
    """(index of the range or -1 for each kernel, text of each range)."""
    ranges = nvtx_ranges(database, tables, MODULE + "%") if RUNTIME in tables else []
    found = np.full(len(correlations), -1, dtype=np.int64)
    if not ranges:
        return found, []
    launched: dict[tuple[int, int], int] = {}
    launches = database.execute(
        f"SELECT globalTid, start, correlationId FROM {RUNTIME} ORDER BY globalTid, start"
    )
    upcoming, open_ranges = 0, list[int]()
    for thread, start, correlation in launches:
        while upcoming < len(ranges) and ranges[upcoming][:2] <= (thread, start):
            open_ranges.append(upcoming)
            upcoming += 1
        # ranges of a thread nest, so what has ended is on top
        while open_ranges and not (
            ranges[open_ranges[-1]][0] == thread and start <= ranges[open_ranges[-1]][2]
        ):
            open_ranges.pop()
        if open_ranges:
            launched[thread & _PROCESS, correlation] = open_ranges[-1]
    for index, key in enumerate(zip(processes.tolist(), correlations.tolist(), strict=True)):
        found[index] = launched.get(key, -1)
    return found, [text for *_, text in ranges]
