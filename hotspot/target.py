"""The program that is profiled: `python -P -m hotspot.target WORKLOAD_JSON OUT STEPS MODE`.

Loads the model, warms up, then decodes steadily inside the capture range and the NVTX range
`decode`, one range `step` a step. `MODE` is `nsys` (the profiler is outside) or `torch`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import Workload
from bench.engines import Decoding, Engine, open_engine

WARM_UP_STEPS = 4


def main() -> None:
    workload = Workload.model_validate_json(sys.argv[1])
    out, steps, mode = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    engine = open_engine(workload)
    decoding = engine.prefill(engine.prompts(workload.seed))
    engine.decode(decoding, WARM_UP_STEPS)
    if mode == "nsys":
        with capture_range():
            decode(engine, decoding, steps)
    else:
        rows = with_torch_profiler(engine, decoding, steps, workload.device)
        out.write_text(json.dumps({"steps": steps, "rows": rows}), encoding="utf-8")


@contextmanager
def capture_range() -> Iterator[None]:
    """What nsys records with `-c cudaProfilerApi`."""
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    torch.cuda.synchronize()
    runtime.cudaProfilerStart()
    cuda.nvtx.range_push("decode")
    try:
        yield
    finally:
        torch.cuda.synchronize()
        cuda.nvtx.range_pop()
        runtime.cudaProfilerStop()


def decode(engine: Engine, decoding: Decoding, steps: int) -> None:
    nvtx: Any = torch.cuda.nvtx
    for _ in range(steps):
        nvtx.range_push("step")
        engine.decode(decoding, 1)
        nvtx.range_pop()


def with_torch_profiler(
    engine: Engine, decoding: Decoding, steps: int, device: str
) -> list[dict[str, Any]]:
    """Rows {name, instances, total_ns} of GPU kernels, or of CPU operators by their own time.

    On a CPU each norm module is a row of its own, with all that it calls: that is where an op of
    the library would sit, and its operators leave the other rows.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with norm_ranges(engine.model, device), profile(activities=activities) as recorded:
        engine.decode(decoding, steps)
    if device == "cuda":
        return gpu_rows(recorded)
    return cpu_rows(recorded)


@contextmanager
def norm_ranges(model: torch.nn.Module, device: str) -> Iterator[None]:
    """`module::<class>` ranges around norms while operators are profiled."""
    handles: list[Any] = []
    if device == "cpu":
        for module in model.modules():
            name = type(module).__name__
            if name.endswith("RMSNorm"):
                open_ranges: list[Any] = []

                def enter(_m: Any, _a: Any, name: str = name, held: Any = open_ranges) -> None:
                    held.append(torch.profiler.record_function(f"module::{name}"))
                    held[-1].__enter__()

                def leave(_m: Any, _a: Any, _o: Any, held: Any = open_ranges) -> None:
                    held.pop().__exit__(None, None, None)

                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gpu_rows(recorded: Any) -> list[dict[str, Any]]:
    totals: dict[str, list[int]] = {}
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            row = totals.setdefault(event.name, [])
            row.append(round(event.time_range.elapsed_us() * 1e3))
    return [
        {"name": name, "instances": len(times), "total_ns": sum(times)}
        for name, times in totals.items()
        if not name.startswith(("Memcpy", "Memset")) and sum(times) > 0
    ]


def cpu_rows(recorded: Any) -> list[dict[str, Any]]:
    totals: dict[str, list[int]] = {}

    def inside_module(event: Any) -> bool:
        parent = event.cpu_parent
        while parent is not None:
            if parent.name.startswith("module::"):
                return True
            parent = parent.cpu_parent
        return False

    for event in recorded.events():
        if inside_module(event):
            continue
        whole = event.name.startswith("module::")
        spent: float = event.cpu_time_total if whole else event.self_cpu_time_total
        totals.setdefault(event.name, []).append(round(spent * 1e3))
    return [
        {"name": name, "instances": len(times), "total_ns": sum(times)}
        for name, times in totals.items()
        if sum(times)
    ]


if __name__ == "__main__":
    main()
