"""Traces of torch.profiler read, whole and damaged."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import patcher.hotspot.readers.kineto
from patcher import bench
from patcher.hotspot.readers.kineto import read_kineto
from patcher.hotspot.recording import Launches

DATA = Path(__file__).parents[1] / "data/kineto"
TRACE = DATA / "vllm-decode-kineto.json.gz"


def launches_of(path: Path) -> Launches:
    launches = read_kineto(path).launches
    assert launches is not None
    return launches


def kernel(name: str = "k", ts: object = 10, dur: object = 2, **args: object) -> dict[str, object]:
    given = {"device": 0, "stream": 7, **args}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": given}


def launch(ts: float, correlation: int, category: str = "cuda_runtime") -> dict[str, object]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": "l", "ts": ts, "dur": 1, "args": args}


def mark(number: int, ts: float, dur: float, category: str = "user_annotation") -> dict[str, Any]:
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": {}}


def trace(folder: Path, *events: object, **more: object) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": list(events), **more}), encoding="utf-8")
    return path


def test_every_launch_of_a_decode_trace() -> None:
    recording = read_kineto(TRACE)
    launches = launches_of(TRACE)
    document = json.loads(gzip.decompress(TRACE.read_bytes()))
    events = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    assert len(launches) == len(events) == 1497
    assert len(launches.texts) == 35
    assert (np.diff(launches.start) >= 0).all()
    by_name: dict[str, int] = {}
    for event in events:
        by_name[event["name"]] = by_name.get(event["name"], 0) + round(event["dur"] * 1000)
    durations = launches.end - launches.start
    for code, name in enumerate(launches.texts):
        assert durations[launches.name == code].sum() == by_name[name]
    assert recording.memory is not None
    assert recording.memory.shape == (42, 3)
    assert recording.steps is None
    assert recording.rows == ()
    assert recording.hidden is None
    assert recording.source == "torch.profiler trace vllm-decode-kineto.json.gz"
    assert recording.gpu is not None
    assert (recording.gpu.name, recording.gpu.multiprocessors) == ("NVIDIA H200", 132)
    assert recording.gpu.compute_capability == "9.0"
    assert set(launches.device.tolist()) == {0}
    assert set(launches.stream.tolist()) == {7}


def test_old_categories_and_whole_microseconds() -> None:
    launches = launches_of(DATA / "hta_inference_rank_1.json.gz")
    assert launches.start[0] == 1665536373729077000
    assert (launches.end - launches.start).tolist() == [4000, 6000, 15000, 5000]


def test_a_kernel_of_triton_falls_into_its_profiler_step() -> None:
    """Launched by the driver's API, in another process than the one that marks the steps."""
    recording = read_kineto(DATA / "hta_triton_example.json.gz")
    assert recording.steps is not None
    assert recording.steps.bounds.tolist() == [[2413669097444592, 2413669097446352]]


def test_the_old_bare_list_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([kernel("a", 5, 1), kernel("b", 3, 1)]))
    launches = launches_of(path)
    assert [launches.texts[code] for code in launches.name] == ["b", "a"]
    assert launches.start.tolist() == [3000, 5000]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4377927760756.678", 4377927760756678),
        ('"4377927760756.678"', 4377927760756678),
        ("4377927760756", 4377927760756000),
        ('"4377927760756"', 4377927760756000),
        ("4.377927760756678e12", 4377927760756678),
        ("1790857026000000.001", 1790857026000000001),
        ("0.0004", 0),
    ],
)
def test_times_are_exact_to_the_nanosecond(tmp_path: Path, written: str, expected: int) -> None:
    path = trace(tmp_path, kernel(ts="HERE"))
    path.write_text(path.read_text().replace('"HERE"', written))
    assert launches_of(path).start.tolist() == [expected]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**15), st.integers(0, 999))
def test_any_time_with_three_decimals_is_exact(whole: int, decimals: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = trace(Path(folder), kernel(ts="HERE"))
        path.write_text(path.read_text().replace('"HERE"', f"{whole}.{decimals:03}"))
        assert launches_of(path).start.tolist() == [whole * 1000 + decimals]


def test_device_and_stream_of_old_traces_are_process_and_thread(tmp_path: Path) -> None:
    event = kernel() | {"args": {}, "pid": 3, "tid": "20"}
    launches = launches_of(trace(tmp_path, event))
    assert (launches.device.tolist(), launches.stream.tolist()) == ([3], [20])


def test_steps_are_the_gpu_time_of_what_they_launched(tmp_path: Path) -> None:
    """The GPU runs behind: the kernels of step 1 end after step 2 has begun on the CPU."""
    path = trace(
        tmp_path,
        *(mark(1, 0, 10), mark(2, 10, 10), mark(3, 20, 10)),
        *(launch(1, 101), launch(5, 102, "cuda_driver"), launch(12, 103), launch(40, 104)),
        kernel(ts=8, dur=2, correlation=101),
        kernel(ts=11, dur=3, correlation=102),
        # one launch of a CUDA graph, two kernels
        kernel(ts=14, dur=2, correlation=103),
        kernel(ts=16, dur=4, correlation=103),
        kernel(ts=50, dur=1, correlation=104),
        kernel(ts=60, dur=1, correlation=999),
    )
    steps = read_kineto(path).steps
    assert steps is not None
    assert steps.bounds.tolist() == [[8000, 14000], [14000, 20000]]


def test_steps_on_the_gpu_are_taken_as_kineto_gives_them(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        mark(1, 0, 10),
        mark(2, 20, 5, "gpu_user_annotation"),
        mark(1, 12, 4, "gpu_user_annotation"),
        mark(1, 13, 5, "gpu_user_annotation"),
        kernel(ts=12),
    )
    steps = read_kineto(path).steps
    assert steps is not None
    assert steps.bounds.tolist() == [[12000, 18000], [20000, 25000]]


def test_the_gpu_is_the_one_with_the_kernels(tmp_path: Path) -> None:
    cards = [{"id": 0, "name": "A"}, {"id": 5, "name": "B\x1b[31m", "numSms": "many"}]
    recording = read_kineto(trace(tmp_path, kernel(device=5), deviceProperties=cards))
    assert recording.gpu is not None
    assert recording.gpu.name == "B [31m"
    assert recording.gpu.multiprocessors is None
    assert recording.gpu.compute_capability is None
    assert read_kineto(trace(tmp_path, kernel(device=7), deviceProperties=cards)).gpu is None


@pytest.mark.parametrize("count", [0, -5, 10**400, "132"])
def test_a_count_of_multiprocessors_that_cannot_be_is_none(tmp_path: Path, count: object) -> None:
    device = {"id": 0, "name": "NVIDIA H200", "numSms": count}
    gpu = read_kineto(trace(tmp_path, kernel(), deviceProperties=[device])).gpu
    assert gpu is not None
    assert gpu.multiprocessors is None


def test_times_whose_sums_would_overflow_are_damage(tmp_path: Path) -> None:
    decades = 2 * 10**15
    many = [kernel(ts=at, dur=decades) for at in range(20)]
    apart = [kernel(ts=at, device=device) for device in range(4) for at in (-decades, decades)]
    for events in (many, apart):
        with pytest.raises(bench.UsageError, match="is damaged: its kernels or copies take years"):
            read_kineto(trace(tmp_path, *events))


def test_a_trace_without_gpu_work_says_how_to_record_it(tmp_path: Path) -> None:
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 1}
    with pytest.raises(bench.UsageError, match="no GPU kernels") as caught:
        read_kineto(trace(tmp_path, operator))
    assert "ProfilerActivity.CUDA" in caught.value.hint


def test_a_table_of_key_averages_is_refused_with_the_fix() -> None:
    with pytest.raises(bench.UsageError, match="key_averages") as caught:
        read_kineto(DATA / "key_averages.txt")
    assert "export_chrome_trace" in caught.value.hint


def test_a_gzip_bomb_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patcher.hotspot.readers.kineto, "MAX_TRACE", 4 << 20)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (5 << 20) + b"]"))
    with pytest.raises(bench.UsageError, match="larger than 4 MB"):
        read_kineto(path)


WHOLE = json.dumps({"traceEvents": [kernel()]}).encode()
HOSTILE = {
    "empty": b"",
    "blank": b" \n ",
    "binary": b"\x00\x01{",
    "not utf-8": b'{"traceEvents": ["\xff"]}',
    "prose": b"to be or not to be",
    "number": b"12",
    "string": b'"traceEvents"',
    "no events": b'{"traceEvents": {}}',
    "empty list": b"[]",
    "odd events": b'[1, null, "x", [], {}, {"cat": 3}, {"ph": "X", "cat": null}]',
    "cut": WHOLE[:-10],
    "cut gzip": gzip.compress(TRACE.read_bytes())[:30_000],
    "no gzip": b"\x1f\x8b\x08 this is none",
    "deep": b"[" * 1_000_000,
    "deep object": b'{"a":' * 300_000,
    "huge integer": WHOLE.replace(b'"ts": 10', b'"ts": ' + b"9" * 5000),
    "large integer": WHOLE.replace(b'"ts": 10', b'"ts": ' + b"9" * 40),
    "huge exponent": WHOLE.replace(b'"ts": 10', b'"ts": 1e999999999'),
    "nan": WHOLE.replace(b'"ts": 10', b'"ts": NaN'),
    "infinite": WHOLE.replace(b'"dur": 2', b'"dur": -Infinity'),
    "negative": WHOLE.replace(b'"dur": 2', b'"dur": -2'),
    "no duration": WHOLE.replace(b'"dur"', b'"dura"'),
    "true": WHOLE.replace(b'"ts": 10', b'"ts": true'),
    "text": WHOLE.replace(b'"ts": 10', b'"ts": "soon"'),
    "list": WHOLE.replace(b'"ts": 10', b'"ts": [1]'),
    "number as name": WHOLE.replace(b'"k"', b"5"),
    "far device": WHOLE.replace(b'"device": 0', b'"device": 4294967296'),
    "odd device": WHOLE.replace(b'"device": 0', b'"device": {}'),
    "arguments are none": WHOLE.replace(b'{"device": 0, "stream": 7}', b"null"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_traces_are_one_sentence_and_a_fix(case: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(bench.UsageError) as caught:
        read_kineto(path)
    assert "\n" not in caught.value.message
    assert "trace.json" in caught.value.message
    assert caught.value.hint


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(bench.UsageError):
            read_kineto(path)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 16_644), st.binary(min_size=1, max_size=8))
def test_a_damaged_trace_never_escapes_as_another_error(at: int, junk: bytes) -> None:
    content = gzip.decompress((DATA / "hta_triton_example.json.gz").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(content[:at] + junk + content[at + len(junk) :])
        try:
            launches = launches_of(path)
        except bench.UsageError:
            return
    assert launches.texts
