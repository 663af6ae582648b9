"""Integer columns out of a SQLite file at the speed of a bare query, by ADBC's SQLite driver.

Python's own driver makes an object of every cell: three times slower on ten million kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import nanoarrow
import numpy as np
from numpy.typing import DTypeLike, NDArray

from bench import UsageError

Column = NDArray[Any]
"""Of the integer type that was asked for."""
_ROWS = 1 << 16
"""A batch. The type of a column is settled by its first batch."""
_THREADS = min(4, os.cpu_count() or 1)
_SMALL = 1 << 17
"""Rows that are not worth a second thread."""


def uri(path: Path) -> str:
    """Read-only and immutable: nothing is locked, changed or left beside the file."""
    return f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"


def read_columns(
    path: Path,
    table: str,
    rowids: tuple[int, int],
    columns: Sequence[str],
    dtypes: Sequence[DTypeLike],
) -> list[Column]:
    """These expressions over the rows of a table, in order of row ids; all are integers.

    Args:
        rowids: the least and the greatest row id; parts in between are read side by side.

    Raises:
        UsageError: no integers, out of the dtype's range, or a damaged database.
    """
    first, last = rowids
    threads = _THREADS if last - first > _SMALL else 1
    edges = [first + (last - first + 1) * part // threads for part in range(threads + 1)]
    queries = [
        f"SELECT {', '.join(columns)} FROM {table} WHERE rowid >= {begin} AND rowid < {end}"
        for begin, end in pairwise(edges)
    ]
    try:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(lambda query: _run(path, query, dtypes), queries))
    except (adbc_driver_manager.Error, RuntimeError, _NotIntegers) as error:  # nanoarrow's own
        why = str(error).split("\n")[0][:200]
        raise UsageError(
            f"{path.name} cannot be read: {why}", "the file may be cut off; export it again"
        ) from error
    found = []
    for index, dtype in enumerate(dtypes):
        chunks = [chunk for part in parts for chunk in part[index]]
        found.append(np.concatenate(chunks or [np.empty(0, dtype)]))
        for part in parts:
            part[index].clear()
    return found


def _run(path: Path, query: str, dtypes: Sequence[DTypeLike]) -> list[list[Column]]:
    """The chunks of each column."""
    parts: list[list[Column]] = [[] for _ in dtypes]
    with (
        adbc_driver_sqlite.connect(uri(path)) as database,
        adbc_driver_manager.AdbcConnection(database) as connection,
        adbc_driver_manager.AdbcStatement(connection) as statement,
    ):
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_ROWS)})
        statement.set_sql_query(query)
        stream, _ = statement.execute_query()
        for batch in nanoarrow.c_array_stream(stream):
            for index, dtype in enumerate(dtypes):
                parts[index].append(_narrow(_integers(batch.child(index)), dtype))
    return parts


class _NotIntegers(Exception):
    pass


def _integers(column: Any) -> Column:
    """A column of a batch (`nanoarrow.CArray`)."""
    if not len(column):
        return np.empty(0, np.int64)
    view = column.view()
    if column.schema.format != "l" or view.null_count:
        raise _NotIntegers("times, names or devices that are no numbers")
    values = np.frombuffer(view.buffer(1), dtype=np.int64)
    return values[column.offset : column.offset + len(column)]


def _narrow(values: Column, dtype: DTypeLike) -> Column:
    if np.dtype(dtype) == np.int64:
        return values.copy()  # the batch's memory is gone with the batch
    limits = np.iinfo(dtype)
    if len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise _NotIntegers("numbers that are too large")
    return values.astype(dtype)
