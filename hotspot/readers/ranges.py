"""NVTX ranges and the kernels launched in them."""

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
    """When and by which thread each kernel was launched; -1 where no call is recorded."""

    at: Integers
    """Start of the call, ns on the host's clock, which nsys makes the GPU's too."""
    thread: Integers


@dataclass(frozen=True)
class Ranges:
    """Closed ranges, by thread and start, outer before inner."""

    thread: Integers
    start: Integers
    end: Integers
    texts: tuple[str, ...]

    def around(self, calls: Calls) -> Integers:
        """The innermost range around each call, on the thread that made it; -1: none."""
        found = np.full(len(calls.at), -1, dtype=np.int64)
        for thread in np.unique(self.thread):
            own = np.flatnonzero(self.thread == thread)
            made = np.flatnonzero(calls.thread == thread)
            inner = np.searchsorted(self.start[own], calls.at[made], side="right") - 1
            parent = _parents(self.end[own])
            late = inner >= 0
            while late.any():  # the last that began may have ended: then the one around it
                late[late] = self.end[own][inner[late]] < calls.at[made][late]
                inner[late] = parent[inner[late]]
                late &= inner >= 0
            found[made] = np.where(inner >= 0, own[inner], -1)
        return found

    def during(self, calls: Calls) -> Integers:
        """The range in which each call was made, by whichever thread; -1: none."""
        order = np.argsort(self.start, kind="stable")
        place = np.searchsorted(self.start[order], calls.at, side="right") - 1
        found = order[place]
        return np.where((place >= 0) & (calls.at <= self.end[found]), found, -1)


def _parents(ends: Integers) -> Integers:
    """The range that each range lies in, or -1; ranges are in order of start and nest."""
    parents, around = np.full(len(ends), -1, dtype=np.int64), list[int]()
    for index, end in enumerate(ends.tolist()):
        while around and ends[around[-1]] < end:
            around.pop()
        parents[index] = around[-1] if around else -1
        around.append(index)
    return parents


def nvtx_ranges(database: sqlite3.Connection, tables: set[str], like: str) -> Ranges | None:
    """Closed ranges whose text is LIKE that; None if there are none.

    The text is in `text`, or a string that `textId` names.
    """
    if NVTX not in tables:
        return None
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({NVTX})")}
    if not {"text", "start", "end", "globalTid"} <= columns:
        return None
    said, join = "n.text", ""
    if "textId" in columns:
        said, join = "COALESCE(n.text, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
    rows = database.execute(
        f'SELECT n.globalTid, n.start, n."end", {said} FROM {NVTX} n {join} '
        f'WHERE {said} LIKE ? AND n."end" IS NOT NULL ORDER BY 1, 2, 3 DESC',
        (like,),
    ).fetchall()
    if not rows:
        return None
    table = np.array([row[:3] for row in rows], dtype=np.int64)
    texts = tuple(str(row[3]) for row in rows)
    return Ranges(table[:, 0], table[:, 1], table[:, 2], texts)


def row_ids(database: sqlite3.Connection, table: str) -> tuple[int, int] | None:
    """The least and the greatest; None for an empty table."""
    # one at a time: asked for both, SQLite walks through the whole table
    [first] = database.execute(f"SELECT MIN(rowid) FROM {table}").fetchone()
    [last] = database.execute(f"SELECT MAX(rowid) FROM {table}").fetchone()
    return None if first is None else (int(first), int(last))


def launching_calls(
    path: Path, rowids: tuple[int, int] | None, correlations: Integers, processes: Integers
) -> Calls:
    """The API call behind each kernel; the kernels of a CUDA graph share the graph's launch.

    `rowids` are those of the table of calls; None: there is none.
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
    """Process and correlation id, which has 32 bits, in one integer."""
    return np.searchsorted(numbers, processes) << 32 | correlations & 0xFFFFFFFF
