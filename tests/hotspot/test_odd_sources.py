"""Sources in forms that nobody named: badly merged, packed, of other locales, large numbers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from traces_sample import EPOCH, STEP, Event, Export, call, kernel, steps, write_trace

from patcher.bench import UsageError
from patcher.hotspot import Profile, read

STEPS = [f"ProfilerStep#{number}" for number in range(4)]


def whole(profile: Profile, steps: int = 4) -> None:
    """Check the steps of five kernels."""
    assert (profile.steps, profile.total_kernel_ns) == (steps, steps * 52_250)


def merged(*, same_process: bool, first: int = 101, late: float = 25.0) -> list[Event]:
    """Two ranks whose kernels have one device number and one `pid`."""
    other = 100 if same_process else 200
    return [*steps(STEPS), *steps(STEPS, pid=other, device_pid=0, first=first, late=late)]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (merged(same_process=True), "repeat their correlations"),
        (merged(same_process=True, late=9e6), "repeat their correlations"),
        (merged(same_process=True, first=901), "run at the same time"),
        (merged(same_process=False), "2 processes launch kernels on 1 device"),
        (merged(same_process=False, first=901), "2 processes launch kernels on 1 device"),
    ],
)
def test_ranks_that_cannot_be_told_apart_are_refused(
    events: list[Event], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        read(write_trace(tmp_path / "t.json", events))
    assert "merged from several ranks" in caught.value.message
    assert "`pid`" in caught.value.hint


def test_calls_of_other_programs_are_no_ranks(tmp_path: Path) -> None:
    """A driver's call inside a runtime's has its correlation; a helper may launch now and then."""
    own = steps(STEPS)
    inner = [
        e | {"cat": "cuda_driver", "name": "cuLaunchKernel"} for e in own if "runtime" in e["cat"]
    ]
    helper = [call(EPOCH, 101, pid=999), call(EPOCH, 102, pid=999)]
    twice = [event for event in own if "runtime" in event["cat"]]
    whole(read(write_trace(tmp_path / "t.json", [*own, *inner, *helper, *twice])))


def test_each_ranks_clock_is_its_own(tmp_path: Path) -> None:
    """Hours between the clocks of two ranks are no idle time."""
    own = steps(STEPS, pid=1, device_pid=0)
    own += steps(STEPS, pid=2, device=1, device_pid=1, first=501, late=3 * 3600e6)
    profile = read(write_trace(tmp_path / "t.json", own))
    assert [device.wall_ns for device in profile.devices] == [218_500, 218_500]
    assert (profile.steps, profile.wall_ns) == (4, 437_000)


@pytest.mark.parametrize("first", [(1 << 31) - 7, 1 << 31, 1 << 40])
def test_correlations_are_not_bounded_by_31_bits(first: int, tmp_path: Path) -> None:
    own = steps(STEPS, first=first)
    before = [call(EPOCH - 900, 7), kernel("prefill", EPOCH - 800, 99.0, 7)]
    whole(read(write_trace(tmp_path / "t.json", [*before, *own])))


def test_numbers_of_an_export_are_not_bounded_by_31_bits(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    for step in range(8):
        begin = 100_000 * step
        export.range("execute_new_0_cached_4", begin, begin + 90_000)
        for place, (text, microseconds) in enumerate(STEP):
            correlation = (1 << 32) - 20 + 5 * step + place
            at, start = begin + 10 + place, begin + 9_000 * (place + 1)
            where = {"correlation": correlation, "stream": (7, (1 << 32) - 1)[place % 2]}
            export.launch(text, start, round(1000 * microseconds) // 10, at=at, **where)
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    export.database.execute(f"UPDATE {table} SET rowid = rowid * 4294967299")
    export.add("TARGET_INFO_GPU", (0, "NVIDIA H100 80GB HBM3", 1, 1, 132, 0, 9, 0))
    profile = read(export.done())
    assert (profile.steps, profile.phase, profile.total_kernel_ns) == (8, "decode", 8 * 5_225)
    assert profile.devices == ()
    assert profile.gpu is not None
    assert profile.gpu.name == "NVIDIA H100 80GB HBM3"


def test_kernels_that_cupti_could_not_time_add_no_wall_time(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    now = 5_000_000_000
    for text, microseconds in (STEP[0], STEP[1], STEP[4], STEP[3]) * 2:
        export.launch(text, now, round(1000 * microseconds))
        export.launch("never timed", 0, 0)
        now += round(1000 * microseconds) + 500
    profile = read(export.done())
    assert (profile.total_kernel_ns, profile.wall_ns) == (99_500, 103_000)
    assert sum(kernel.instances for kernel in profile.kernels) == 8
    assert profile.bound == "kernels"
    [warning] = [warning for warning in profile.warnings if warning.kind == "untimed"]
    assert warning.message.startswith("8 of 16 kernels are left out")


NOW = 1_764_000_000_000_000_000
"""Nanoseconds since 1970, as `nsys export --ts-normalize=true` counts."""


def test_times_may_count_from_1970(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    rows = []
    for step in range(8):
        begin = NOW + 100_000 * step
        export.range("step", begin, begin + 50_000)
        export.launch("gemm", begin + 100, 5_000, at=begin + 50, correlation=step + 1)
        rows.append(
            f"{begin + 100},5000,{step + 1},1,1,1,32,1,1,16,0,0,,,,,NVIDIA H100 (0),1,7,gemm"
        )
    copy = (NOW + 10_000, NOW + 14_000, 0, 7, 900, 77 << 24)
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copy)
    profile = read(export.done())
    assert (profile.steps, profile.total_kernel_ns, profile.memory_ns) == (8, 40_000, 4_000)
    head = "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),"
    head += "DymSMem (MB),Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name"
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    assert read(path).wall_ns == 705_000
    path.write_text("\n".join([head, *rows, rows[0].replace(str(NOW + 100), "0")]) + "\n")
    with pytest.raises(UsageError, match="impossible times"):
        read(path)


def test_a_trace_of_a_large_job_is_a_trace(tmp_path: Path) -> None:
    """Kineto writes the ranks of every group before the events."""
    groups = [{"pg_name": str(name), "ranks": list(range(2048))} for name in range(20)]
    whole(read(write_trace(tmp_path / "t.json", steps(STEPS), distributedInfo={"pg": groups})))


def test_a_trace_needs_no_unit_and_no_schema(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(STEPS))
    for more in ({}, {"displayTimeUnit": "ns"}, {"baseTimeNanoseconds": 1712345678000000000}):
        events = json.loads(path.read_text())["traceEvents"]
        (tmp_path / "bare.json").write_text(json.dumps({**more, "traceEvents": events}))
        whole(read(tmp_path / "bare.json"))


def test_an_empty_window_is_no_window_in_every_source(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    export.launch("gemm", 50, 5_000, at=10, correlation=1)
    export.range("step", 0, 100)
    for path in (export.done(), write_trace(tmp_path / "t.json", steps(STEPS))):
        with pytest.raises(UsageError, match=r"has no .* ''"):
            read(path, window="")


def test_what_is_packed_twice_or_otherwise_is_named(tmp_path: Path) -> None:
    text = write_trace(tmp_path / "t.json", steps(STEPS)).read_bytes()
    half = len(text) // 2
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]) + b"\0" * 99)
    whole(read(path))
    for content, said in (
        (gzip.compress(gzip.compress(text)), "a gzip of a file that is not text"),
        (gzip.compress(b"SQLite format 3\0" + b"\0" * 99), "a gzip of a file that is not text"),
        (b"\x50\x2a\x4d\x18\4\0\0\0abcd\x28\xb5\x2f\xfd", "a zstd archive"),
        (b"\x04\x22\x4d\x18" + b"a" * 99, "an lz4 archive"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=said) as caught:
            read(path)
        assert "unpack it" in caught.value.hint


ENGLISH = (
    "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
    "60.0,6000,2,3000.0,3000.0,3000,3000,0.0,gemm\n40.0,4000,2,2000.0,2000.0,2000,2000,0.0,norm\n"
)


@pytest.mark.parametrize(
    "text",
    [
        ENGLISH.replace(",", ";"),
        ENGLISH.replace(",", ";").replace(".", ","),
        "sep=;\n" + ENGLISH.replace(",", ";").replace(".", ","),
        ENGLISH.replace("60.0", '"60,0"').replace("40.0", '"40,0"'),
        ENGLISH.replace(",", "\t").replace(".", ","),
        ENGLISH.replace("6000,", '"6\u202f000",'),
        ENGLISH.replace("6000,", "6'000,"),
        ENGLISH.replace("6000,", "6 000,"),
    ],
)
def test_a_summary_of_another_locale_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(ENGLISH, encoding="utf-8")
    assert read(path).total_kernel_ns == 10_000
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="has numbers of another locale") as caught:
        read(path)
    assert caught.value.hint.startswith("LC_ALL=C nsys stats")
