"""nsys exports: windows, modules, memory operations, Parquet, and what never leaves them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from patcher import bench
from patcher.hotspot import read
from patcher.hotspot.readers import read_recording

EXPORT = Path(__file__).parents[1] / "data/nsys/decode.sqlite"
TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
  (start INT, "end" INT, demangledName INT, deviceId INT, streamId INT,
   correlationId INT, globalPid INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
  (start INT, "end" INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, "end" INT, deviceId INT);
CREATE TABLE NVTX_EVENTS (start INT, "end" INT, text TEXT, textId INT, globalTid INT);
CREATE TABLE TARGET_INFO_GPU
  (name TEXT, memoryBandwidth INT, smCount INT, clockRate INT, smMajor INT, smMinor INT);
CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
INSERT INTO StringIds VALUES (1, 'warm'), (2, 'gemm'), (3, 'norm'), (4, 'cudaLaunchKernel'),
  (5, 'decode');
INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H200', 4814304000000, 132, 1980000000, 9, 0);
INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE:HF_TOKEN', 'hf_secret'),
  ('HOST_COMPUTER_NAME', 'secrethost');
"""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Two processes with the same correlation ids: only the first one's are inside the range."""
    path = tmp_path / "run.sqlite"
    first, second = 1 << 24, 2 << 24
    with sqlite3.connect(path) as database:
        database.executescript(TABLES)
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 4)",
            [
                (5, 6, first + 7, 1),
                (20, 21, first + 7, 2),
                (30, 31, first + 9, 3),
                (500, 501, second + 7, 2),
            ],
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 0, 7, ?, ?)",
            [
                (10, 15, 1, 1, first),
                (100, 130, 2, 2, first),
                (140, 150, 3, 3, first),
                (600, 640, 1, 2, second),
            ],
        )
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (132, 138, 0)")
        database.execute(f"INSERT INTO NVTX_EVENTS VALUES (18, 40, NULL, 5, {first + 7})")
    return path


def names(path: Path, window: str | None = None) -> list[str]:
    launches = read_recording(path, window).launches
    assert launches is not None
    return [launches.texts[code] for code in launches.name]


def test_a_window_is_what_was_launched_in_the_range(export: Path) -> None:
    assert names(export) == ["warm", "gemm", "norm", "warm"]
    assert names(export, "decode") == ["gemm", "norm"], "by any thread, of whatever process"


def test_a_window_that_is_not_there_names_those_that_are(export: Path) -> None:
    with pytest.raises(bench.UsageError) as caught:
        read(export, "m", window="prefill")
    assert caught.value.hint == "it has: decode"
    with pytest.raises(bench.UsageError, match="no NVTX range"):
        read(export, "m", window="%")


def test_copies_and_the_gpu_are_read(export: Path) -> None:
    profile = read(export, "m", window="decode")
    assert (profile.busy_ns, profile.memory_ns, profile.wall_ns) == (40, 6, 50)
    [idle] = [spot for spot in profile.hotspots if spot.kind == "idle"]
    assert idle.exposed_ns == 4
    assert profile.gpu is not None
    assert profile.gpu.memory_bytes_per_s == 4814304000000
    assert profile.gpu.compute_capability == "9.0"


def test_environment_hosts_and_folders_do_not_leave_the_export(export: Path) -> None:
    written = read(export, "m").model_dump_json()
    for secret in ("hf_secret", "HF_TOKEN", "secrethost", str(export.parent)):
        assert secret not in written


def test_parquet_reads_to_the_same_as_sqlite(tmp_path: Path) -> None:
    folder = to_parquet(EXPORT, tmp_path / "decode")
    from_parquet, from_sqlite = read(folder, "gpt-oss-20b"), read(EXPORT, "gpt-oss-20b")
    assert from_parquet.kernels == from_sqlite.kernels
    assert from_parquet.hotspots == from_sqlite.hotspots
    assert from_parquet.source == "nsys export decode"
    (folder / "StringIds.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(bench.UsageError, match=r"StringIds\.parquet cannot be read"):
        read(folder, "m")
    with pytest.raises(bench.UsageError, match="is a folder without"):
        read(tmp_path, "m")


def to_parquet(source: Path, folder: Path) -> Path:
    import pandas

    folder.mkdir()
    with sqlite3.connect(source) as database:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        for (table,) in database.execute(query).fetchall():
            frame = pandas.read_sql(f'SELECT * FROM "{table}"', database)
            frame.to_parquet(folder / f"{table}.parquet")
    return folder


def changed(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "being written": (
        lambda path: path.with_name(path.name + "-wal").write_bytes(b"x" * 100),
        "is being written",
    ),
    "null time": (
        lambda path: changed(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = NULL"),
        "no kernel with a time",
    ),
    "late text": (
        lambda path: changed(
            path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 4"
        ),
        "cannot be read",
    ),
    "real time": (
        lambda path: changed(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 0.5"),
        "not numbers",
    ),
    "far future": (
        lambda path: changed(path, f'UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = {1 << 62}'),
        "impossible times",
    ),
    "no times": (
        lambda path: changed(path, "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN start"),
        "without names or times",
    ),
    "a view that never ends": (
        lambda path: [
            changed(path, "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"),
            changed(
                path,
                "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(i) AS "
                '(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS "end", '
                "1 AS demangledName FROM n",
            ),
        ],
        "has no CUDA kernels",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_export_is_one_sentence(case: str, export: Path) -> None:
    damage, message = DAMAGE[case]
    damage(export)
    before = sorted(export.parent.iterdir())
    with pytest.raises(bench.UsageError, match=message) as caught:
        read(export, "m")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert sorted(export.parent.iterdir()) == before


def test_a_name_of_nul_bytes_and_megabytes_is_cut(export: Path) -> None:
    changed(export, "UPDATE StringIds SET value = char(0) || 'k' || hex(zeroblob(2000000))")
    profile = read(export, "m")
    assert all(len(kernel.name) <= 20_000 for kernel in profile.kernels)
    assert "\0" not in profile.kernels[0].name


def test_a_graph_level_trace_is_refused_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "graph.sqlite"
    shutil.copy(EXPORT, path)
    changed(path, "CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)")
    changed(
        path,
        "INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE', 'Graph')",
    )
    with pytest.raises(bench.UsageError, match="traced as a whole") as caught:
        read(path, "m")
    assert "nsys profile --cuda-graph-trace=node" in caught.value.hint
    forced = read(path, "m", force=True)
    assert [warning.kind for warning in forced.warnings] == ["graph_level"]
    assert forced.kernels


def test_a_summary_in_which_nothing_runs_once_a_layer_is_refused(tmp_path: Path) -> None:
    header = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns)"
    path = tmp_path / "kernels.csv"
    path.write_text(
        f"{header},Name\n90.0,9000,16,562.5,500.0,500,600,1.0,head\n"
        "10.0,1000,32,31.25,31.0,30,40,1.0,argmax\n"
    )
    with pytest.raises(bench.UsageError, match="though the model has 24 layers"):
        read(path, "gpt-oss-20b")
    assert read(path, "gpt-oss-20b", force=True).kernels
    assert read(path, "another model").kernels


def test_a_locked_database_is_refused_and_not_waited_for(export: Path) -> None:
    with closing(sqlite3.connect(export, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN EXCLUSIVE")
        rows = [(index, str(index) * 1000) for index in range(10, 400)]
        writer.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        with pytest.raises(bench.UsageError, match="is being written"):
            read(export, "m")
        writer.execute("ROLLBACK")
    assert read(export, "m").kernels


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "is an HDF5 export"),
        (b"ARROW1" + bytes(99), "is an Arrow export"),
        (b'{"Type":79,"CudaEvent":{"startNs":"1"}}\n', "lines of JSON"),
        (b'{"id":1,"value":"gemm"}\n', "lines of JSON"),
    ],
)
def test_other_exports_of_nsys_are_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(content)
    with pytest.raises(bench.UsageError, match=said) as caught:
        read(tmp_path / "run")
    assert "--type sqlite" in caught.value.hint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("rocpd_kernel_dispatch_1", "database of rocprofv3"),
        ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", "profile of nvprof"),
        ("other", "is no nsys export"),
    ],
)
def test_databases_of_others_are_named(table: str, said: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "run.db")) as database:
        database.execute(f"CREATE TABLE {table} (id)")
    with pytest.raises(bench.UsageError, match=said):
        read(tmp_path / "run.db")
