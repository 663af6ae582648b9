"""Small traces and exports, written in the forms that profilers write."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
EPOCH = 1_615_207_264_505_000
"""Microseconds at which the traces begin."""
STEP = (
    ("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn", 30.0),
    ("void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, int)", 3.0),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", 2.5),
    ("void vllm::act_and_mul_kernel<c10::BFloat16>(c10::BFloat16*)", 4.25),
    ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64> >()", 12.5),
)
"""Kernels of a step and their microseconds, 52.25 in all."""
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "computeMajor": 8}


def kernel(name: str, ts: float, dur: float, correlation: int | None = None, **more: Any) -> Event:
    """A kernel; `pid` is the device unless given."""
    device, stream = more.pop("device", 0), more.pop("stream", 7)
    args: Event = {"device": device, "stream": stream}
    if correlation is not None:
        args["correlation"] = correlation
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream}
    return {**event, "ts": ts, "dur": dur, "args": args, **more}


def call(
    ts: float, correlation: int, pid: Any = 100, tid: Any = 100, runtime: str = "cuda"
) -> Event:
    """A launch on the host."""
    event = {"ph": "X", "cat": f"{runtime}_runtime", "name": "LaunchKernel", "pid": pid}
    return {**event, "tid": tid, "ts": ts, "dur": 1.0, "args": {"correlation": correlation}}


def mark(name: str, ts: float, dur: float, pid: Any = 100, tid: Any = 100) -> Event:
    """An annotation on the host."""
    event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": pid, "tid": tid}
    return {**event, "ts": ts, "dur": dur, "args": {}}


def steps(
    names: Sequence[str],
    *,
    device: int = 0,
    pid: Any = 100,
    device_pid: Any = None,
    first: int = 101,
    runtime: str = "cuda",
    late: float = 0.0,
    scale: float = 1.0,
) -> list[Event]:
    """Steps of `STEP`, one after the other, each launched inside an annotation of that name.

    Args:
        names: the annotations' names; an empty one is left out.
        device: the kernels' device.
        pid: the host's process.
        device_pid: the process of GPU work; by default the device.
        first: the first correlation.
        runtime: `cuda` or `xpu`.
        late: microseconds by which all begins later.
        scale: factor of the kernels' times.
    """
    events: list[Event] = []
    host, gpu, correlation = EPOCH + late, EPOCH + late + 20, first
    for name in names:
        if name:
            events.append(mark(name, host, 50.0, pid, pid))
        for at, (text, dur) in enumerate(STEP):
            events.append(call(host + 1 + 10 * at, correlation, pid, pid, runtime))
            one = kernel(text, gpu, dur * scale, correlation, device=device)
            if device_pid is not None:
                one["pid"] = device_pid
            events.append(one)
            gpu += dur * scale + 0.5
            correlation += 1
        host += 50
    return events


def write_trace(path: Path, events: Iterable[Event], **more: Any) -> Path:
    document = {"schemaVersion": 1, "deviceProperties": [A100], **more}
    document["traceEvents"] = list(events)
    path.write_text(json.dumps(document, indent=0), encoding="utf-8")
    return path


TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, "end" INT, deviceId INT, streamId INT,
  correlationId INT, globalPid INT, demangledName INT, graphNodeId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, "end" INT, deviceId INT, streamId INT,
  correlationId INT, globalPid INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, "end" INT, globalTid INT, correlationId INT,
  nameId INT);
CREATE TABLE NVTX_EVENTS (start INT, "end" INT, eventType INT, text TEXT, globalTid INT);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, memoryBandwidth INT, clockRate INT, smCount INT,
  cuDevice INT, smMajor INT, smMinor INT);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INT, cudaId INT, pid INT);
"""
T400 = (0, "NVIDIA T400 4GB", 80_000_000_000, 1_425_000_000, 6, 1, 7, 5)
H100 = (1, "NVIDIA H100 80GB HBM3", 3_352_320_000_000, 1_980_000_000, 132, 0, 9, 0)


class Export:
    """An nsys export, written row by row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(TABLES)
        self._names: dict[str, int] = {}

    def add(self, table: str, *rows: tuple[Any, ...]) -> None:
        marks = ", ".join("?" * len(rows[0]))
        self.database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)

    def name(self, text: str) -> int:
        if text not in self._names:
            self._names[text] = len(self._names) + 1
            self.add("StringIds", (self._names[text], text))
        return self._names[text]

    def launch(
        self,
        text: str,
        start: int,
        length: int,
        *,
        at: int | None = None,
        correlation: int = 0,
        process: int = 77,
        thread: int = 5,
        device: int = 0,
        stream: int = 7,
        node: int | None = None,
    ) -> None:
        """A kernel and, with `at`, its call on the host."""
        owner = process << 24
        row = (start, start + length, device, stream, correlation, owner, self.name(text), node)
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", row)
        if at is not None:
            called = (at, at + 4000, owner + thread, correlation, self.name("cudaLaunchKernel"))
            self.add("CUPTI_ACTIVITY_KIND_RUNTIME", called)

    def range(
        self, text: str, start: int, end: int | None, process: int = 77, thread: int = 5
    ) -> None:
        self.add("NVTX_EVENTS", (start, end, 59, text, (process << 24) + thread))

    def done(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


def two_ranks(path: Path) -> Path:
    """Two processes, each with eight ranges `step`; the second launches early and its GPU lags."""
    export = Export(path)
    for process, device, lead, thread in ((77, 0, 0, 5), (88, 1, 700, 5)):
        now, correlation = 5_000_000_000 + lead, 1
        for step in range(8):
            begin = now - 9_000 if device == 0 else now + 1_300
            length = 51_250 if device == 0 else 7_000
            export.range("step", begin, begin + length, process, thread)
            for place, (text, microseconds) in enumerate((STEP[0], STEP[1], STEP[4], STEP[3])):
                gap = 12_000 if device == 0 else 1_000
                at = begin + 500 + place * gap
                spent = round(microseconds * 1000)
                where = {"process": process, "thread": thread, "device": device}
                export.launch(text, now, spent, at=at, correlation=correlation, **where)
                now, correlation = now + spent + 500, correlation + 1
            assert step < 8
    export.add("TARGET_INFO_GPU", (0, *H100[1:]), (1, *H100[1:5], 1, *H100[6:]))
    return export.done()
