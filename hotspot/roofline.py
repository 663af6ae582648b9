"""The speed of light: the least time that a kernel's bytes and FLOPs take on the GPU at hand.

Roofline model: Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from patcher.bench import Op, Point, UsageError, presets
from patcher.hotspot.profile import Counters, Gpu
from patcher.hotspot.rules import rules

REACHABLE = 0.8
"""Of the speed of light: what a good kernel reaches."""


@dataclass(frozen=True)
class ServedModel:
    """What is known of the model that was profiled."""

    layers: int | None = None
    axes: dict[str, int] | None = None
    """Sizes by the axis names of the op contracts; `tokens` is the batch of a decode step."""

    @classmethod
    def of(cls, model: str, batch: int | None = None) -> ServedModel:
        """Of a preset; nothing is known of other models but the batch."""
        known = presets().get(model)
        if known is None:
            return cls(axes={"tokens": batch} if batch else None)
        axes = {"tokens": batch or known.batch, "hidden": int(known.config["hidden_size"])}
        return cls(layers=known.layers, axes=axes)


@dataclass(frozen=True)
class LaunchCost:
    """Of one launch."""

    bytes: float | None
    flops: float | None
    source: str


def cost_of(op: Op | None, counters: Counters | None, served: ServedModel) -> LaunchCost | None:
    """What the op says must be moved, else what Nsight Compute counted."""
    if op is not None and served.axes and "tokens" in served.axes:
        try:
            sweep = op.sweep("cuda")
        except UsageError:
            sweep = None
        if sweep is not None:
            axes = {**sweep.fixed, sweep.axis: served.axes["tokens"]}
            axes |= {name: served.axes[name] for name in sweep.fixed if name in served.axes}
            point = Point(axes=axes, dtypes=sweep.dtypes)
            return LaunchCost(
                op.contract.bytes_moved(point), op.contract.flops(point), f"op {op.name}"
            )
    if counters is not None and (counters.dram_bytes or counters.flops):
        return LaunchCost(counters.dram_bytes, counters.flops, "ncu")
    return None


def speed_of_light_ns(cost: LaunchCost, gpu: Gpu | None) -> float | None:
    """The longer of memory time and arithmetic time; None where no peak is known for either."""
    if gpu is None:
        return None
    times = []
    if cost.bytes and gpu.memory_bytes_per_s:
        times.append(1e9 * cost.bytes / gpu.memory_bytes_per_s)
    if cost.flops and (peak := _tensor_flops(gpu)):
        times.append(1e9 * cost.flops / peak)
    return max(times, default=None)


def completed(gpu: Gpu | None) -> Gpu | None:
    """The GPU with what `gpus.toml` knows of it where the source says nothing."""
    if gpu is None:
        return None
    for row in rules("gpus")["gpu"]:
        if re.search(row["name"], gpu.name):
            known = {"memory_bytes_per_s": row["memory_bytes_per_s"], "clock_hz": row["clock_hz"]}
            missing = {key: value for key, value in known.items() if getattr(gpu, key) is None}
            return gpu.model_copy(update=missing)
    return gpu


def _tensor_flops(gpu: Gpu) -> float | None:
    per_clock = rules("gpus")["tensor_flops_per_sm_and_clock"].get(gpu.compute_capability or "")
    if per_clock is None or not gpu.multiprocessors or not gpu.clock_hz:
        return None
    return float(per_clock) * gpu.multiprocessors * gpu.clock_hz
