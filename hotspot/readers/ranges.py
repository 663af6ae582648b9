"""Read NVTX ranges, and the API calls that launched the kernels."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from patcher.hotspot.owners import Calls, Ranges
from patcher.hotspot.readers.arrow import read_columns
from patcher.hotspot.timeline import Integers

NVTX = "NVTX_EVENTS"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_PROCESS = ~0xFFFFFF
"""Masks a globalTid to its globalPid: correlation ids repeat between processes."""


def nvtx_ranges(database: sqlite3.Connection, tables: set[str], *like: str) -> Ranges | None:
    """Closed ranges whose text matches one of the SQL patterns; None if there are none.

    The text is in `text`, or in the string that `textId` refers to.
    """
    if NVTX not in tables:
        return None
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({NVTX})")}
    if not {"text", "start", "end", "globalTid"} <= columns:
        return None
    text, join = "n.text", ""
    if "textId" in columns:
        text, join = "COALESCE(n.text, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
    wanted = " OR ".join([f"{text} LIKE ?"] * len(like))
    rows = database.execute(
        f'SELECT n.globalTid, n.start, n."end", {text} FROM {NVTX} n {join} '
        f'WHERE ({wanted}) AND n."end" >= n.start '
        "AND typeof(n.globalTid) || typeof(n.start) = 'integerinteger' "
        "AND typeof(n.\"end\") = 'integer' ORDER BY 1, 2, 3 DESC",
        like,
    ).fetchall()
    if not rows:
        return None
    table = np.array([row[:3] for row in rows], dtype=np.int64)
    texts = tuple(str(row[3]) for row in rows)
    thread = table[:, 0]
    return Ranges(thread, thread & _PROCESS, table[:, 1], table[:, 2], texts)


def row_ids(database: sqlite3.Connection, table: str) -> tuple[int, int] | None:
    """The least and the greatest row id; None for an empty table."""
    # two queries: SQLite scans the whole table for both in one
    [first] = database.execute(f"SELECT MIN(rowid) FROM {table}").fetchone()
    [last] = database.execute(f"SELECT MAX(rowid) FROM {table}").fetchone()
    return None if first is None else (int(first), int(last))


def launching_calls(
    path: Path, rowids: tuple[int, int] | None, correlations: Integers, processes: Integers
) -> Calls:
    """The API call that launched each kernel; all kernels of a CUDA graph share one call.

    `rowids` are the least and the greatest of the table of calls; None if it is empty or missing.
    """
    nowhere = np.full(len(correlations), -1, dtype=np.int64)
    if rowids is None:
        return Calls(nowhere, nowhere, nowhere)
    columns = ("IFNULL(correlationId, -2)", "IFNULL(globalTid, -1)", "start")
    called, threads, starts = read_columns(path, RUNTIME, rowids, columns, [np.int64] * 3)
    if not len(called):
        return Calls(nowhere, nowhere, nowhere)
    numbers = np.unique(np.concatenate((threads & _PROCESS, processes)))
    wanted = _key(numbers, processes, correlations)
    offered = _key(numbers, threads & _PROCESS, called)
    order = np.argsort(offered, kind="stable")
    place = np.minimum(np.searchsorted(offered[order], wanted), len(order) - 1)
    hit = order[place]
    known = offered[hit] == wanted
    thread = np.where(known, threads[hit], -1)
    return Calls(np.where(known, starts[hit], -1), thread, np.where(known, thread & _PROCESS, -1))


def _key(numbers: Integers, processes: Integers, correlations: Integers) -> Integers:
    """Combine process and 32-bit correlation id in one integer."""
    return np.searchsorted(numbers, processes) << 32 | correlations & 0xFFFFFFFF
