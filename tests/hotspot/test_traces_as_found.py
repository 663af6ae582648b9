"""Traces and reports of others, each with the value that was counted by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from patcher.hotspot import Profile, read
from patcher.hotspot.profile import Hotspot

DATA = Path(__file__).parents[1] / "data"
VLLM = DATA / "kineto/vllm_one_step_mi300.json.gz"
SGLANG = DATA / "kineto/sglang_one_step_mi300.json.gz"


def plain(source: Path, folder: Path) -> Path:
    """The file without compression, as a profiler writes it."""
    path = folder / source.name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(source.read_bytes()))
    return path


def unmarked(source: Path, folder: Path) -> Path:
    """The trace without annotations."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if "annotation" not in e["cat"]]
    path = folder / "unmarked.json"
    path.write_text(json.dumps(document))
    return path


def rows(profile: Profile, kind: str = "kernel") -> list[Hotspot]:
    return [spot for spot in profile.hotspots if spot.kind == kind]


def launches(profile: Profile) -> int:
    return sum(kernel.instances for kernel in profile.kernels)


def test_one_step_of_vllm_is_one_step_and_whole() -> None:
    profile = read(VLLM, "gpt-oss-20b")
    assert (profile.steps, profile.phase) == (1, "decode")
    assert (profile.total_kernel_ns, launches(profile)) == (10_674_517, 425)
    assert profile.wall_ns == pytest.approx(10_699_981, abs=1)
    [head] = [spot for spot in rows(profile) if "MT448x32x64" in spot.name]
    assert head.total_ns == pytest.approx(276_700, abs=50)
    assert (head.operation, head.per_step) == ("matmul", 1)
    assert {spot.per_layer for spot in rows(profile) if "matmul_ogs" in spot.name} == {1}
    assert profile.gpu is not None
    assert (profile.gpu.name, profile.gpu.memory_bytes_per_s) == ("AMD Instinct MI300X", 5.3e12)


def test_one_step_of_sglang_is_one_step_and_whole() -> None:
    profile = read(SGLANG)
    assert (profile.steps, profile.phase) == (1, "decode")
    assert (profile.total_kernel_ns, launches(profile)) == (9_765_437, 555)
    tensile = [spot for spot in rows(profile) if spot.name.startswith("Cijk_")]
    assert sum(spot.share_pct for spot in tensile) == pytest.approx(59.3, abs=0.1)
    for spot in tensile:
        assert (spot.origin, spot.operation) == ("tuned library source", "matmul")
        assert spot.triage in ("configuration", "leave")
    assert profile.gpu is not None
    assert profile.gpu.name == "AMD Instinct MI300X"


@pytest.mark.parametrize("source", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_layer_is_not_taken_for_a_step(source: Path, tmp_path: Path) -> None:
    """Without annotations nothing names the step; what cannot be told is said, nothing is cut."""
    path = unmarked(source, tmp_path)
    profile = read(path)
    assert profile.steps is None
    assert launches(profile) in (425, 555)
    [warning] = [w for w in profile.warnings if w.kind == "steps_unknown"]
    assert "may be a layer" in warning.message
    told = read(path, steps=1)
    assert told.steps == 1
    assert told.total_kernel_ns == profile.total_kernel_ns


def test_known_layers_count_the_steps(tmp_path: Path) -> None:
    profile = read(unmarked(VLLM, tmp_path), "gpt-oss-20b")
    assert profile.steps == 1
    assert profile.total_kernel_ns == 10_674_517
    assert profile.steps_source == "kernels that run 24 times a step, once in each layer"


def test_a_step_owns_what_autograds_thread_launched() -> None:
    profile = read(DATA / "kineto/hta_two_threads_mi250.json.gz")
    assert (profile.steps, launches(profile)) == (1, 14)
    assert profile.total_kernel_ns == 110_881
    assert "empty_steps" in {warning.kind for warning in profile.warnings}


def test_a_summary_beside_calls_that_take_longer(tmp_path: Path) -> None:
    profile = read(plain(DATA / "nsys/text/launch_bound_2026.1.1.md.gz", tmp_path))
    assert profile.ceiling_of == "kernel time"
    assert profile.hotspots[0].ceiling_pct == pytest.approx(26.2, abs=0.1)
    [warning] = [w for w in profile.warnings if w.kind == "host_bound"]
    assert "6.05 s" in warning.message
    assert "17.76 s" in warning.message
    assert "end to end the first row gives about 0.4 %" in warning.message
    assert all("of kernel time" in s.reason for s in profile.hotspots if "even an" in s.reason)


def test_counters_join_all_eight_kernels(tmp_path: Path) -> None:
    kernels = plain(DATA / "ncu/sol_names_kernels.csv.gz", tmp_path)
    counters = plain(DATA / "ncu/sol_names_counters.csv.gz", tmp_path)
    profile = read(kernels, ncu=counters)
    assert sum(spot.bytes is not None for spot in profile.hotspots) == 8
    assert "ncu_unmatched" not in {warning.kind for warning in profile.warnings}
    [silu] = [spot for spot in profile.hotspots if "silu_kernel" in spot.name]
    assert silu.bytes == pytest.approx(97_654, abs=1)


def test_a_page_without_bytes_gives_shares_and_says_so(tmp_path: Path) -> None:
    kernels = plain(DATA / "ncu/sol_only_kernels.csv.gz", tmp_path)
    profile = read(kernels, ncu=plain(DATA / "ncu/sol_only.csv.gz", tmp_path))
    first = profile.hotspots[0]
    assert (first.dram_pct, first.sm_pct, first.bytes) == (19.66, 9.15, None)
    assert "ncu_no_bytes" in {warning.kind for warning in profile.warnings}
