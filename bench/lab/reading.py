"""`make bench` for reading profiles: generate nsys-shaped files of any size and time reading them.

Three programs take turns on one file, each in its own process. They are a bare SQLite query as the
lower limit, `patcher profile` (interval union, steps and chains), and `pandas.read_sql` with a
groupby for the same statistics and the union, without steps or chains.
"""

from __future__ import annotations

import json
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from patcher.bench.machine.environment import describe

SIZES = (100_000, 1_000_000, 10_000_000)
STEP = (
    ("embedding_norm", 3100),
    *(
        (name, ns)
        for _ in range(24)
        for name, ns in (
            ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_bias_TNT", 10_000),
            ("triton_poi_fused_2", 1_400),
            ("triton_poi_fused_3", 1_300),
            ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(T1 *)", 2_300),
            ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<(int)2>>(T1::Params)", 12_000),
            ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_bias_TNT", 9_000),
            ("void cublasLt::splitKreduce_kernel<(int)32, (int)16>(T1 *)", 2_000),
            ("triton_red_fused_fused_add_rms_norm_0", 2_100),
            ("_topk_forward", 1_400),
            ("_combined_routing_compute", 2_000),
            ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", 70_000),
            ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1", 45_000),
            ("_reduce_grouped", 3_200),
            ("triton_red_fused_fused_add_rms_norm_1", 2_000),
        )
    ),
    ("nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT", 267_000),
    ("void at::native::reduce_kernel<(int)512, (int)1, ArgMaxOps<float>>(T3)", 9_000),
)
"""Kernels of a decode step with durations in ns, as of a mixture of experts on an H200."""
COLUMNS = (
    "start",
    "end",
    "deviceId",
    "contextId",
    "greenContextId",
    "streamId",
    "correlationId",
    "globalPid",
    "demangledName",
    "shortName",
    "mangledName",
    "launchType",
    "cacheConfig",
    "registersPerThread",
    "gridX",
    "gridY",
    "gridZ",
    "blockX",
    "blockY",
    "blockZ",
    "staticSharedMemory",
    "dynamicSharedMemory",
    "localMemoryPerThread",
    "localMemoryTotal",
    "gridId",
    "sharedMemoryExecuted",
    "graphNodeId",
    "sharedMemoryLimitConfig",
)
"""Columns of CUPTI_ACTIVITY_KIND_KERNEL, export schema 3.20."""


def write_nsys_shaped(path: Path, kernels: int, seed: int = 0) -> None:
    """Write a SQLite file as `nsys export` does.

    Args:
        path: the file.
        kernels: number of kernel launches, in decode steps.
        seed: seed of the durations.
    """
    names = {name: index for index, name in enumerate(dict.fromkeys(name for name, _ in STEP), 1)}
    columns = ", ".join(f'"{name}" INTEGER' for name in COLUMNS)
    insert = f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * len(COLUMNS))})"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        pairs = [(index, name) for name, index in names.items()]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", pairs)
        database.executemany(insert, _rows(kernels, names, seed))
        database.commit()


def _rows(kernels: int, names: dict[str, int], seed: int) -> Iterator[tuple[int | None, ...]]:
    draw = random.Random(seed)
    jitter = [draw.uniform(0.97, 1.06) for _ in range(4093)]
    now = 1_000_000
    for index in range(kernels):
        place = index % len(STEP)
        name, typical = STEP[place]
        # most launches begin shortly after the previous one ended, some shortly before
        now += 60_000 if place == 0 else draw.randint(-300, 700)
        end = now + int(typical * jitter[index % len(jitter)])
        number = names[name]
        yield (
            now,
            end,
            0,
            1,
            None,
            7,
            index,
            1 << 24,
            number,
            number,
            number,
            0,
            0,
            32,
            132,
            1,
            1,
            256,
            1,
            1,
            0,
            49152,
            0,
            0,
            index,
            None,
            None,
            0,
        )
        now = end


BARE = """
import sqlite3, sys, time
begin = time.perf_counter()
database = sqlite3.connect(sys.argv[1])
database.execute('SELECT demangledName, COUNT(*), SUM("end" - start) FROM '
                 'CUPTI_ACTIVITY_KIND_KERNEL GROUP BY demangledName').fetchall()
"""
OURS = """
import sys, time
from pathlib import Path
from patcher.hotspot import read
begin = time.perf_counter()
profile = read(Path(sys.argv[1]), "benchmark")
assert profile.steps and profile.busy_ns
"""
PANDAS = """
import sqlite3, sys, time
import pandas
begin = time.perf_counter()
frame = pandas.read_sql('SELECT s.value AS name, k.start, k."end", k.deviceId, k.streamId FROM '
    'CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName',
    sqlite3.connect(sys.argv[1]))
frame["ns"] = frame["end"] - frame["start"]
frame.groupby("name")["ns"].agg(["count", "sum", "median", "min", "max"])
frame = frame.sort_values("start")
reached = frame["end"].cummax().shift(fill_value=0)
(frame["end"] - frame["start"].clip(lower=reached)).clip(lower=0).sum()
"""
REPORT = """
import json, resource
print(json.dumps([time.perf_counter() - begin,
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def reading_time() -> None:
    """Print one line per size: seconds, ratios of neighbouring runs, and peak memory."""
    print(json.dumps({"environment": describe("cpu").model_dump(mode="json")}))
    for size in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "profile.sqlite"
            write_nsys_shaped(path, size)
            runs = 5 if size >= SIZES[-1] else 9
            times = [(_run(BARE, path), _run(OURS, path), _run(PANDAS, path)) for _ in range(runs)]
        bare, ours, pandas = zip(*times, strict=True)
        against_bare = [o[0] / b[0] for o, b in zip(ours, bare, strict=True)]
        against_pandas = [p[0] / o[0] for o, p in zip(ours, pandas, strict=True)]
        row = {
            "kernels": size,
            "runs": runs,
            "bare_s": _middle([one[0] for one in bare]),
            "patcher_s": _middle([one[0] for one in ours]),
            "pandas_s": _middle([one[0] for one in pandas]),
            "patcher_over_bare": _middle(against_bare),
            "patcher_over_bare_range": [round(min(against_bare), 2), round(max(against_bare), 2)],
            "pandas_over_patcher": _middle(against_pandas),
            "pandas_over_patcher_range": [
                round(min(against_pandas), 2),
                round(max(against_pandas), 2),
            ],
            "patcher_peak_mib": round(max(one[1] for one in ours)),
            "pandas_peak_mib": round(max(one[1] for one in pandas)),
        }
        print(json.dumps(row), flush=True)


def _middle(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _run(program: str, path: Path) -> tuple[float, float]:
    """Run a program; return its seconds without start-up and imports, and its peak MiB."""
    done = subprocess.run(
        [sys.executable, "-c", program + REPORT, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, memory = json.loads(done.stdout)
    return seconds, memory
