"""Read `nsys export --type parquetdir`: one Parquet file per table, with the SQLite columns.

The relevant tables are copied into a SQLite file, so that one reader serves both formats.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from patcher.bench import MissingError, UsageError
from patcher.hotspot.readers.cards import DEVICES, GPUS
from patcher.hotspot.readers.content import first_line
from patcher.hotspot.readers.ranges import NVTX, RUNTIME
from patcher.hotspot.readers.sqlite import GRAPHS, KERNELS, MEMORY, read_sqlite
from patcher.hotspot.recording import Recording

HINT = "nsys export --type parquetdir OUT.nsys-rep"
TABLES = (KERNELS, "StringIds", GRAPHS, *MEMORY, NVTX, RUNTIME, GPUS, DEVICES)
"""META_DATA_CAPTURE is not copied as a whole, since it holds the process's environment."""
CAPTURE = "META_DATA_CAPTURE"
GRAPH_MODE = "CUDA_GRAPH_TRACE_OPTIONS:MODE"
_ROWS = 1 << 16


def read_parquet(folder: Path, window: str | None = None) -> Recording:
    """Read the kernels of a Parquet export; see `read_sqlite`.

    Raises:
        UsageError: the folder is no such export, or it is damaged.
        MissingError: pyarrow is not installed.
    """
    if not (folder / f"{KERNELS}.parquet").is_file():
        raise UsageError(
            f"{folder.name or folder} is a folder without {KERNELS}.parquet", f"give {HINT}"
        )
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f"{folder.name} is Parquet, which needs pyarrow", "pip install 'patcher[parquet]'"
        ) from error
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / folder.name
        with closing(sqlite3.connect(target)) as database:
            for table in (*TABLES, CAPTURE):
                if (folder / f"{table}.parquet").is_file():
                    _copy(database, folder / f"{table}.parquet", table)
            database.commit()
        return read_sqlite(target, window)


def _copy(database: sqlite3.Connection, file: Path, table: str) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as source:
            names = source.schema_arrow.names
            columns = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
            database.execute(f'CREATE TABLE "{table}" ({columns})')
            insert = f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(names))})'
            for batch in source.iter_batches(_ROWS):
                rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                database.executemany(insert, (row for row in rows if _wanted(table, row)))
    except (pyarrow.ArrowException, sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        which = f"{file.parent.name}/{file.name}"
        raise UsageError(f"{which} cannot be read: {first_line(error)}", HINT) from error


def _wanted(table: str, row: tuple[object, ...]) -> bool:
    return table != CAPTURE or any(GRAPH_MODE in str(cell) for cell in row)
