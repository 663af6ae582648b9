"""Find the NVTX range in which each kernel was launched."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patcher.hotspot.readers.arrow import read_columns
from patcher.hotspot.timeline import Integers

NVTX = "NVTX_EVENTS"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_PROCESS = ~0xFFFFFF
"""Masks a globalTid to its globalPid: correlation ids repeat between processes."""


@dataclass(frozen=True)
class Calls:
    """The time and thread of each kernel's launch; -1 if no call is recorded."""

    at: Integers
    """Start of the call in ns on the host's clock, to which nsys converts GPU times."""
    thread: Integers


@dataclass(frozen=True)
class Ranges:
    """Closed ranges, sorted by thread and start, outer before inner."""

    thread: Integers
    start: Integers
    end: Integers
    texts: tuple[str, ...]

    def around(self, calls: Calls) -> Integers:
        """The index of the innermost range around each call on its thread; -1 if none."""
        result = np.full(len(calls.at), -1, dtype=np.int64)
        for thread in np.unique(self.thread):
            own = np.flatnonzero(self.thread == thread)
            mine = np.flatnonzero(calls.thread == thread)
            inner = np.searchsorted(self.start[own], calls.at[mine], side="right") - 1
            parent = _parents(self.end[own])
            late = inner >= 0
            while late.any():  # if the last range to begin has ended, try its parent
                late[late] = self.end[own][inner[late]] < calls.at[mine][late]
                inner[late] = parent[inner[late]]
                late &= inner >= 0
            result[mine] = np.where(inner >= 0, own[inner], -1)
        return result

    def during(self, calls: Calls) -> Integers:
        """The index of the range around each call, on any thread; -1 if none."""
        order = np.argsort(self.start, kind="stable")
        place = np.searchsorted(self.start[order], calls.at, side="right") - 1
        range_ = order[place]
        return np.where((place >= 0) & (calls.at <= self.end[range_]), range_, -1)


def _parents(ends: Integers) -> Integers:
    """The parent of each range, or -1; ranges are in order of start and nested."""
    parents, around = np.full(len(ends), -1, dtype=np.int64), list[int]()
    for index, end in enumerate(ends.tolist()):
        while around and ends[around[-1]] < end:
            around.pop()
        parents[index] = around[-1] if around else -1
        around.append(index)
    return parents


def nvtx_ranges(database: sqlite3.Connection, tables: set[str], like: str) -> Ranges | None:
    """Closed ranges whose text matches the SQL pattern `like`; None if there are none.

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
    rows = database.execute(
        f'SELECT n.globalTid, n.start, n."end", {text} FROM {NVTX} n {join} '
        f'WHERE {text} LIKE ? AND n."end" IS NOT NULL ORDER BY 1, 2, 3 DESC',
        (like,),
    ).fetchall()
    if not rows:
        return None
    table = np.array([row[:3] for row in rows], dtype=np.int64)
    texts = tuple(str(row[3]) for row in rows)
    return Ranges(table[:, 0], table[:, 1], table[:, 2], texts)


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
        return Calls(nowhere, nowhere)
    columns = ("IFNULL(correlationId, -2)", "IFNULL(globalTid, -1)", "start")
    called, threads, starts = read_columns(path, RUNTIME, rowids, columns, [np.int64] * 3)
    if not len(called):
        return Calls(nowhere, nowhere)
    numbers = np.unique(np.concatenate((threads & _PROCESS, processes)))
    wanted = _key(numbers, processes, correlations)
    offered = _key(numbers, threads & _PROCESS, called)
    order = np.argsort(offered, kind="stable")
    place = np.minimum(np.searchsorted(offered[order], wanted), len(order) - 1)
    hit = order[place]
    known = offered[hit] == wanted
    return Calls(np.where(known, starts[hit], -1), np.where(known, threads[hit], -1))


def _key(numbers: Integers, processes: Integers, correlations: Integers) -> Integers:
    """Combine process and 32-bit correlation id in one integer."""
    return np.searchsorted(numbers, processes) << 32 | correlations & 0xFFFFFFFF
