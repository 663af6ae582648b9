"""Read integer columns of a SQLite file quickly, with ADBC's SQLite driver.

Python's own driver makes an object of every cell, which is three times slower on ten million
kernels. One thread reads: the stream of batches holds the GIL, so a second would not help.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import nanoarrow
import numpy as np
from numpy.typing import DTypeLike, NDArray

from patcher.bench import UsageError
from patcher.hotspot.readers.content import first_line

Column = NDArray[Any]
"""Shape (rows,), of the integer dtype that the caller chose."""
_BATCH = 1 << 16
"""Rows per batch. The first batch determines the type of a column."""
_LEAST_ROW = 8
"""Minimum bytes of a row in a file, with its entry in the page."""


def uri(path: Path) -> str:
    """A read-only, immutable SQLite URI: no lock, no change, no journal beside the file."""
    return f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"


def read_columns(
    path: Path,
    table: str,
    rowids: tuple[int, int],
    columns: Sequence[str],
    dtypes: Sequence[DTypeLike],
) -> list[Column]:
    """Evaluate integer expressions over the rows of a table, in order of row ids.

    Args:
        path: the SQLite file.
        table: the table's name.
        rowids: the least and the greatest row id, which bound the number of rows.
        columns: one SQL expression per column.
        dtypes: the integer dtype of each column.

    Returns:
        One array of shape (rows,) per column.

    Raises:
        UsageError: a value is not an integer or exceeds its dtype, or the database is damaged.
    """
    most = max(min(rowids[1] - rowids[0] + 1, path.stat().st_size // _LEAST_ROW), 0)
    arrays = [np.empty(most, dtype) for dtype in dtypes]
    try:
        rows = _fill(path, f"SELECT {', '.join(columns)} FROM {table}", arrays)
    except (adbc_driver_manager.Error, RuntimeError, _NotReadable) as error:  # nanoarrow's own
        raise UsageError(
            f"{path.name} cannot be read: {first_line(error)}",
            "the file may be cut off; export it again",
        ) from error
    return [column[:rows] for column in arrays]


def _fill(path: Path, query: str, columns: Sequence[Column]) -> int:
    """Read the rows into the columns; return their number."""
    done = 0
    with (
        adbc_driver_sqlite.connect(uri(path)) as database,
        adbc_driver_manager.AdbcConnection(database) as connection,
        adbc_driver_manager.AdbcStatement(connection) as statement,
    ):
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH)})
        statement.set_sql_query(query)
        stream, _ = statement.execute_query()
        for batch in nanoarrow.c_array_stream(stream):
            end = done + len(batch)
            for index, column in enumerate(columns):
                if end > len(column):
                    raise _NotReadable("more rows than its row ids allow")
                _put(_integers(batch.child(index)), column[done:end])
            done = end
    return done


class _NotReadable(Exception):
    pass


def _integers(column: Any) -> Column:
    """A column of a batch (`nanoarrow.CArray`)."""
    if not len(column):
        return np.empty(0, np.int64)
    view = column.view()
    if column.schema.format != "l" or view.null_count:
        raise _NotReadable("times, names or devices are not numbers")
    values = np.frombuffer(view.buffer(1), dtype=np.int64)
    return values[column.offset : column.offset + len(column)]


def _put(values: Column, room: Column) -> None:
    limits = np.iinfo(room.dtype)
    narrow = room.dtype != np.int64 and len(values)
    if narrow and (values.min() < limits.min or values.max() > limits.max):
        raise _NotReadable("numbers are too large")
    room[:] = values
