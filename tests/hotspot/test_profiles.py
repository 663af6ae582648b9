"""Profiles read, classified, ranked and captured."""

from __future__ import annotations

import random
import sqlite3
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_sample import TINY

import patcher.hotspot.nsys
from patcher import bench
from patcher.hotspot import capture, find_nsys, nsys_finding, read
from patcher.hotspot.timeline import busy_time

DATA = Path(__file__).parents[1] / "data/nsys"
SUMMARY = DATA / "cuda_gpu_kern_sum.csv"
EXPORT = DATA / "decode.sqlite"
"""The first 4 of the 24 steps behind SUMMARY: kernels, names and graph launches only."""


def test_a_kernel_summary_reads_to_its_totals() -> None:
    profile = read(SUMMARY, "gpt-oss-20b")
    assert profile.total_kernel_ns == 77_548_893
    assert sum(kernel.instances for kernel in profile.kernels) == 11_976
    assert profile.busy_ns is None
    assert sum(kernel.share_pct for kernel in profile.kernels) == pytest.approx(100)
    top = profile.hotspots[0]
    assert top.name == "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu"
    assert top.share_pct == pytest.approx(27.516, abs=1e-3)
    assert top.ceiling_pct == pytest.approx(100 * 0.27516 / (1 - 0.27516), abs=1e-2)
    [covered] = [spot for spot in profile.hotspots if spot.op == "fused_add_rms_norm"]
    assert [variant.name for variant in covered.variants] == [
        "triton_red_fused_fused_add_rms_norm_1",
        "triton_red_fused_fused_add_rms_norm_0",
    ]
    assert profile.source == "nsys kernel summary cuda_gpu_kern_sum.csv"


def test_an_export_has_busy_time_steps_and_medians() -> None:
    profile = read(EXPORT, "gpt-oss-20b")
    with sqlite3.connect(EXPORT) as database:
        rows = database.execute(
            'SELECT s.value, k.start, k."end" FROM CUPTI_ACTIVITY_KIND_KERNEL k '
            "JOIN StringIds s ON s.id = k.demangledName"
        ).fetchall()
    assert profile.total_kernel_ns == sum(end - start for _, start, end in rows)
    assert profile.busy_ns == union([(start, end) for _, start, end in rows])
    assert profile.steps == 4
    for kernel in profile.kernels:
        times = [end - start for name, start, end in rows if name == kernel.name]
        assert kernel.instances == len(times)
        assert kernel.median_ns == np.median(times)
        assert (kernel.min_ns, kernel.max_ns) == (min(times), max(times))
    assert profile.hotspots[0].per_step == 24
    summary = read(SUMMARY, "gpt-oss-20b")
    assert [k.name for k in profile.kernels][:5] == [k.name for k in summary.kernels][:5]


def union(intervals: list[tuple[int, int]]) -> int:
    """Length of the union, one unit at a time where they are short, else by merging."""
    total, reach = 0, -(10**18)
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40))
def test_busy_time_is_the_union(pairs: list[tuple[int, int]]) -> None:
    covered = {unit for start, length in pairs for unit in range(start, start + length)}
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    ends = np.array([start + length for start, length in pairs], dtype=np.int64)
    assert busy_time(starts, ends) == len(covered)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def foreign_database(path: Path) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    return path


def kernel_database(path: Path, rows: list[tuple[object, ...]]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, "end" INT, demangledName INT)'
        )
        database.execute("CREATE TABLE StringIds (id INT, value TEXT)")
        database.execute("INSERT INTO StringIds VALUES (1, 'k')")
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?)", rows)
    return path


BAD = {
    "missing": lambda p: p / "nothing.csv",
    "folder": lambda p: p,
    "empty": lambda p: write(p / "x.csv", b""),
    "binary": lambda p: write(p / "x.csv", random.Random(0).randbytes(5000)),
    "cut database": lambda p: write(p / "x.sqlite", EXPORT.read_bytes()[:40_000]),
    "damaged database": lambda p: write(
        p / "x.sqlite", EXPORT.read_bytes()[:4096] + b"\xff" * (len(EXPORT.read_bytes()) - 4096)
    ),
    "foreign database": lambda p: foreign_database(p / "x.sqlite"),
    "no kernels": lambda p: kernel_database(p / "x.sqlite", []),
    "backwards": lambda p: kernel_database(p / "x.sqlite", [(10, 5, 1)]),
    "text times": lambda p: kernel_database(p / "x.sqlite", [("soon", "late", 1)]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_a_fix(case: str, tmp_path: Path) -> None:
    path = BAD[case](tmp_path)
    with pytest.raises(bench.UsageError) as caught:
        read(path, "m")
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_kernels_launched_inside_a_norm_are_its_row(tmp_path: Path) -> None:
    path = tmp_path / "eager.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INT, value TEXT);
            INSERT INTO StringIds VALUES (1, 'pow'), (2, 'mean'), (3, 'gemm'), (4, 'cudaLaunch');
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
              (start INT, "end" INT, demangledName INT, correlationId INT, globalPid INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
              (start INT, globalTid INT, correlationId INT, nameId INT);
            CREATE TABLE NVTX_EVENTS (start INT, "end" INT, text TEXT, globalTid INT);
            INSERT INTO NVTX_EVENTS VALUES (0, 100, 'step', 16777217),
              (10, 30, 'module::GptOssRMSNorm', 16777217);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES
              (11, 16777217, 1, 4), (15, 16777217, 2, 4), (40, 16777217, 3, 4);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES
              (50, 55, 1, 1, 16777216), (60, 67, 2, 2, 16777216), (70, 90, 3, 3, 16777216);
            """
        )
    rows = {kernel.name: kernel for kernel in read(path, "m").kernels}
    assert set(rows) == {"module::GptOssRMSNorm", "gemm"}
    norm = rows["module::GptOssRMSNorm"]
    assert (norm.instances, norm.total_ns) == (1, 12)
    spots = {spot.name: spot for spot in read(path, "m").hotspots}
    assert spots["module::GptOssRMSNorm"].op == "fused_add_rms_norm"


def test_nsys_is_looked_for_and_its_absence_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(patcher.hotspot.nsys, "PLACES", (f"{tmp_path}/compute/*/host/nsys",))
    assert find_nsys() is None
    status, message, fix = nsys_finding()
    assert (status, bool(message), bool(fix)) == ("warn", True, True)
    for version in ("2024.3", "2025.10", "2025.9"):
        tool = tmp_path / "compute" / version / "host/nsys"
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 1\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    found = find_nsys()
    assert found is not None
    assert "2025.10" in str(found)
    monkeypatch.setattr(patcher.hotspot.nsys, "PLACES", ())
    with pytest.raises(bench.MissingError):
        read(write(tmp_path / "x.nsys-rep", b"report"), "m")


def test_a_library_that_the_importer_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Nsight Compute lays it out: the command in one folder, its importer in another."""
    library, target = tmp_path / "libnsysneeds.so.1", tmp_path / "host/target-linux-x64"
    importer = tmp_path / "host/linux-desktop-x64/QdstrmImporter"
    target.mkdir(parents=True)
    importer.parent.mkdir()
    tool = target / "nsys"
    tool.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 1\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "lib.cpp").write_text("int answer() { return 42; }")
    (tmp_path / "main.cpp").write_text("int answer(); int main() { return answer(); }")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libnsysneeds.so.1"]
    build = ["g++", str(tmp_path / "lib.cpp"), "-o", str(library), *flags]
    subprocess.run(build, check=True)
    subprocess.run(
        ["g++", str(tmp_path / "main.cpp"), str(library), "-o", str(importer)], check=True
    )
    library.rename(tmp_path / "kept")
    monkeypatch.setenv("PATCHER_NSYS", str(tool))
    status, message, fix = nsys_finding()
    assert (status, message) == ("fail", "lacks libnsysneeds.so.1")
    assert "PATCHER_NSYS_LIBS" in fix
    (tmp_path / "libs").mkdir()
    (tmp_path / "kept").rename(tmp_path / "libs/libnsysneeds.so.1")
    monkeypatch.setenv("PATCHER_NSYS_LIBS", str(tmp_path / "libs"))
    assert nsys_finding()[0] == "ok"


def test_a_cpu_is_profiled_by_operators(tmp_path: Path) -> None:
    profile = capture(TINY, tmp_path, steps=3)
    assert [warning.kind for warning in profile.warnings] == ["cpu_operators"]
    norms = {spot.name: spot for spot in profile.hotspots}["module::GptOssRMSNorm"]
    assert norms.op == "fused_add_rms_norm"
    assert norms.per_step == 2 * bench.preset("gpt-oss-tiny").layers + 1
    with pytest.raises(bench.MissingError, match="does not fit a CPU"):
        capture(TINY.model_copy(update={"model": "gpt-oss-20b"}), tmp_path)


def test_keys_do_not_reach_what_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """nsys writes the whole environment of the profiled program into its report."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:8080")
    monkeypatch.setenv("VLLM_USE_FLASHINFER", "1")
    environment = patcher.hotspot.nsys.nsys_environment()
    assert not [value for value in environment.values() if "secret" in value]
    assert "AWS_PROFILE" not in environment
    assert environment["VLLM_USE_FLASHINFER"] == "1"
    assert "PATH" in environment
