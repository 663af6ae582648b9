"""Several devices, ranks, processes and threads in one file; which range started what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces_sample import (
    EPOCH,
    H100,
    STEP,
    T400,
    Event,
    Export,
    call,
    kernel,
    mark,
    steps,
    two_ranks,
    write_trace,
)

from patcher.bench import UsageError
from patcher.hotspot import Profile, read
from patcher.hotspot.owners import Calls, Ranges, owners
from patcher.hotspot.readers import cards

STEPS = [f"ProfilerStep#{number}" for number in range(4)]


def total(profile: Profile) -> tuple[int, int]:
    return sum(kernel.instances for kernel in profile.kernels), profile.total_kernel_ns


def trace(folder: Path, *events: Event, **more: Any) -> Path:
    return write_trace(folder / "trace.json", events, **more)


@pytest.mark.parametrize("window", [None, "step"])
def test_each_rank_owns_its_own_steps(window: str | None, tmp_path: Path) -> None:
    profile = read(two_ranks(tmp_path / "t.sqlite"), window=window)
    assert total(profile) == (64, 796_000)
    assert profile.steps == 8
    first = profile.hotspots[0]
    assert (first.operation, round(first.share_pct, 1), first.per_step) == ("matmul", 60.3, 1)
    assert [device.device for device in profile.devices] == [0, 1]
    assert {device.steps for device in profile.devices} == {8}
    assert {device.total_kernel_ns for device in profile.devices} == {398_000}
    assert "devices_added" in {warning.kind for warning in profile.warnings}


def test_imbalance_and_collectives_are_shown(tmp_path: Path) -> None:
    waiting = [
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", EPOCH + 8000, 209.0, 900),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", EPOCH + 8000, 5.0, 901, device=1),
    ]
    own = [*steps(STEPS), *steps(STEPS, device=1, first=500, scale=2.0)]
    profile = read(trace(tmp_path, *own, *waiting), window="all")
    one, other = profile.devices
    assert (one.collectives_ns, other.collectives_ns) == (209_000, 5_000)
    assert other.busy_ns - other.collectives_ns == 2 * (one.busy_ns - one.collectives_ns)
    [warning] = [w for w in profile.warnings if w.kind == "devices_added"]
    assert "Device 1 computes longest, 33.3 % above the mean" in warning.message
    assert sum(device.busy_ns for device in profile.devices) == profile.busy_ns


def test_merged_traces_of_two_ranks_that_share_numbers(tmp_path: Path) -> None:
    """As SGLang's merger writes them: every `pid` has its rank before it."""
    ranks = [
        steps(STEPS, pid=f"[TP0{rank}] 41", device_pid=f"[TP0{rank}] 0", late=30 * rank)
        for rank in range(2)
    ]
    profile = read(trace(tmp_path, *ranks[0], *ranks[1]))
    assert total(profile) == (40, 2 * 209_000)
    assert profile.steps == 4
    labels = [device.label for device in profile.devices]
    assert labels == ["[TP00] 0 (device 0 of its trace)", "[TP01] 0 (device 0 of its trace)"]


def test_merged_traces_with_numbers_for_ranks(tmp_path: Path) -> None:
    """Both ranks have the same correlations; the calls come before the kernels of their own."""
    ranks = [steps(STEPS, pid=5 + r, device_pid=1000 * r, late=700 * r) for r in range(2)]
    profile = read(trace(tmp_path, *ranks[0], *ranks[1]))
    assert total(profile) == (40, 2 * 209_000)
    assert [device.steps for device in profile.devices] == [4, 4]


def test_one_number_that_is_another_gpu_in_each_process(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    for process in (77, 88):
        for at in range(4):
            export.launch("gemm", 10_000 * at + 50, 5_000, process=process)
    export.add("TARGET_INFO_GPU", T400, H100, (2, *H100[1:]))
    export.add("TARGET_INFO_CUDA_DEVICE", (1, 0, 77), (2, 0, 88))
    profile = read(export.done())
    assert [device.device for device in profile.devices] == [1, 2]
    assert profile.busy_ns == 40_000
    assert {device.gpu.name for device in profile.devices if device.gpu} == {H100[1]}


def two_processes(path: Path, *processes: tuple[int, int, int]) -> Export:
    """Processes that launch at the same time: (process, device, launches)."""
    export = Export(path)
    for process, device, launches in processes:
        for at in range(launches):
            export.launch("gemm", 10_000 * at + 50, 5_000, process=process, device=device)
        copy = (6_000, 7_000, device, 7, 0, process << 24)
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copy)
    return export


def test_one_number_in_two_processes_without_a_word_on_gpus(tmp_path: Path) -> None:
    """Each may have had a GPU of its own, as CUDA_VISIBLE_DEVICES gives them."""
    profile = read(two_processes(tmp_path / "t.sqlite", (77, 0, 4), (88, 0, 3)).done())
    labels = [device.label for device in profile.devices]
    assert labels == ["device 0 of process 77", "device 0 of process 88"]
    assert [device.total_kernel_ns for device in profile.devices] == [20_000, 15_000]
    assert [device.memory_ns for device in profile.devices] == [1000, 1000]
    [warning] = [each for each in profile.warnings if each.kind == "devices_unknown"]
    assert "does not tell which GPUs these are: device 0 of process 77" in warning.message


def test_two_processes_on_the_only_gpu_share_it(tmp_path: Path) -> None:
    export = two_processes(tmp_path / "t.sqlite", (77, 0, 4), (88, 0, 3))
    export.add("TARGET_INFO_GPU", H100)
    profile = read(export.done())
    assert not profile.devices
    assert (profile.total_kernel_ns, profile.busy_ns) == (35_000, 20_000)


def test_processes_with_a_number_each_stay_as_they_are(tmp_path: Path) -> None:
    profile = read(two_processes(tmp_path / "t.sqlite", (77, 1, 4), (88, 3, 3)).done())
    assert [(device.device, device.label) for device in profile.devices] == [(1, None), (3, None)]


def test_processes_of_which_only_some_are_told(tmp_path: Path) -> None:
    export = two_processes(tmp_path / "t.sqlite", (77, 0, 4), (88, 0, 3), (99, 0, 2), (100, 2, 1))
    export.add("TARGET_INFO_GPU", T400, H100, (2, *H100[1:]))
    export.add("TARGET_INFO_CUDA_DEVICE", (1, 0, 77), (2, 0, 88))
    devices = read(export.done()).devices
    assert [(each.device, each.label) for each in devices] == [
        (0, "device 0 of process 99"),
        (1, None),
        (2, None),
        (3, "device 2 of process 100"),
    ]
    assert [each.launches for each in devices] == [2, 4, 3, 1]


def test_processes_are_found_in_a_large_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cards, "_SAMPLE", 4)
    profile = read(two_processes(tmp_path / "t.sqlite", (77, 0, 300), (88, 0, 100)).done())
    assert [device.launches for device in profile.devices] == [300, 100]


def test_more_devices_than_a_machine_has_are_refused(tmp_path: Path) -> None:
    export = two_processes(tmp_path / "t.sqlite", *((77, number, 1) for number in range(1100)))
    with pytest.raises(UsageError, match="kernels on 1,100 devices"):
        read(export.done())


def test_the_gpu_that_ran_is_looked_up_by_its_id(tmp_path: Path) -> None:
    for linked in (True, False):
        export = Export(tmp_path / f"{linked}.sqlite")
        export.launch("gemm", 50, 5_000)
        export.add("TARGET_INFO_GPU", T400, H100)
        if linked:
            export.add("TARGET_INFO_CUDA_DEVICE", (1, 0, 77))
        gpu = read(export.done()).gpu
        assert gpu is not None
        assert (gpu.name, gpu.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
        assert gpu.memory_bytes_per_s == pytest.approx(3.35e12, rel=1e-3)


@pytest.mark.parametrize("runtime", ["cuda", "xpu", "hip", "privateuse1"])
def test_every_runtimes_calls_count(runtime: str, tmp_path: Path) -> None:
    before = [call(EPOCH - 5000, 900, runtime=runtime), kernel("prefill", EPOCH - 4990, 999, 900)]
    own = steps(STEPS[:2], runtime=runtime)
    if runtime == "xpu":  # its kernels have a queue instead of a stream
        for event in own:
            if event["cat"] == "kernel":
                del event["args"]["stream"]
                event["args"]["sycl queue"] = 64
    profile = read(trace(tmp_path, *before, *own))
    assert (profile.steps, profile.total_kernel_ns) == (2, 104_500)


def test_a_range_owns_the_launches_of_threads_without_ranges(tmp_path: Path) -> None:
    own = steps(STEPS)
    for event in own:
        if event["cat"] == "cuda_runtime" and event["args"]["correlation"] % 2:
            event["tid"] = 101  # autograd's
    profile = read(trace(tmp_path, *own))
    assert total(profile) == (20, 209_000)
    assert profile.steps == 4


def test_two_threads_that_name_steps_stay_apart(tmp_path: Path) -> None:
    own = steps(STEPS)
    for event in steps(STEPS, device=1, first=500, late=25):
        own.append(event if event["cat"] == "kernel" else event | {"tid": 999})
    profile = read(trace(tmp_path, *own))
    assert [device.steps for device in profile.devices] == [4, 4]
    assert total(profile) == (40, 418_000)


def test_a_range_inside_another_of_its_name_is_part_of_the_step(tmp_path: Path) -> None:
    inner = [mark("step", EPOCH + 50 * i + 20, 20) for i in range(4)]
    assert read(trace(tmp_path, *steps(["step"] * 4), *inner)).steps == 4


def test_an_engines_steps_count_before_a_profilers(tmp_path: Path) -> None:
    names = ["execute_context_0(0)_generation_8(8)"] * 4
    around = mark("ProfilerStep#0", EPOCH - 1, 500)
    assert read(trace(tmp_path, around, *steps(names))).steps == 4


def test_launches_without_a_correlation_go_to_their_neighbours(tmp_path: Path) -> None:
    own = steps(STEPS)
    for event in own[4::11]:
        event["args"].pop("correlation", None)
    profile = read(trace(tmp_path, *own, kernel("later", EPOCH + 9000, 5.0)))
    assert total(profile) == (20, 209_000)


def test_without_any_call_the_kernels_time_decides(tmp_path: Path) -> None:
    own = [event for event in steps(STEPS) if event["cat"] != "cuda_runtime"]
    late = kernel("later", EPOCH + 9000, 5.0)
    profile = read(trace(tmp_path, *own, late))
    assert profile.steps is not None
    assert "later" not in {kernel.name for kernel in profile.kernels}


def test_a_window_is_any_annotation(tmp_path: Path) -> None:
    own = [*steps(STEPS), mark("warm", EPOCH, 49.5)]
    profile = read(trace(tmp_path, *own), window="warm")
    assert total(profile) == (5, 52_250)


def test_kernels_of_a_graph_belong_to_the_range_of_its_launch(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    for step in range(3):
        begin = 100_000 * step
        export.range("execute_context_0(0)_generation_4(4)", begin, begin + 9_000)
        for node, (text, _) in enumerate(STEP):
            at = begin + 500 if node == 0 else None
            start = begin + 20_000 + 6_000 * node
            export.launch(text, start, 5_000, at=at, correlation=step + 1, node=node)
    export.launch("elsewhere", 900_000, 5_000, at=890_000, correlation=99)
    profile = read(export.done())
    assert (profile.steps, profile.phase) == (3, "decode")
    assert total(profile) == (15, 75_000)


def test_ranges_without_an_end_and_untimed_kernels_are_left_out(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    for step in range(3):
        begin = 100_000 * step
        export.range("step", begin, begin + 90_000 if step < 2 else None)
        export.launch("gemm", begin + 10, 5_000, at=begin + 5, correlation=step + 1)
        export.launch("gemm", 0, 0, correlation=50 + step)
    profile = read(export.done())
    assert (profile.steps, profile.total_kernel_ns) == (2, 10_000)
    [warning] = [w for w in profile.warnings if w.kind == "untimed"]
    assert "3 of 6 kernels are left out" in warning.message


def test_copies_that_bound_a_run_are_named_with_their_share(tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    for step in range(8):
        begin = 5_000_000_000 + 2_051_750 * step
        for place, (text, _) in enumerate(STEP[:4]):
            export.launch(text, begin + 10_000 * place, 9_000)
        copy = (begin + 52_000, begin + 2_051_000, 0, 7, 900 + step, 77 << 24)
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", copy)
    profile = read(export.done())
    assert profile.bound == "copies"
    assert profile.bound_pct == pytest.approx(97.1, abs=0.3)
    rows = {spot.kind: spot.reason for spot in profile.hotspots}
    assert "copies and fills bound this run" in rows["memory"]
    assert "the GPU is rarely idle: copies bound this run (97" in rows["idle"]


@pytest.mark.parametrize(("gap", "bound"), [(40_000, "launches"), (900_000, "the host")])
def test_gaps_are_the_launches_or_the_hosts(gap: int, bound: str, tmp_path: Path) -> None:
    export = Export(tmp_path / "t.sqlite")
    for at in range(50):
        export.launch("gemm", 1000 + at * (gap + 5_000), 5_000)
    profile = read(export.done())
    assert profile.bound == bound
    [idle] = [spot for spot in profile.hotspots if spot.kind == "idle"]
    assert bound in idle.reason


def test_the_innermost_range_of_the_own_thread_then_of_the_process() -> None:
    ranges = Ranges(
        thread=np.array([1, 1, 2]),
        process=np.array([9, 9, 8]),
        start=np.array([0, 10, 0]),
        end=np.array([100, 30, 100]),
        texts=("a", "b", "c"),
    )
    calls = Calls(
        at=np.array([20, 50, 20, 20, 20, -1, 101]),
        thread=np.array([1, 1, 3, 2, 7, 1, 1]),
        process=np.array([9, 9, 9, 8, 6, 9, 9]),
    )
    assert owners(ranges, calls).tolist() == [1, 0, 1, 2, 1, -1, -1]
