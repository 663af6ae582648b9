"""The speed of light: the least time that a kernel's bytes and FLOPs take on a GPU.

Roofline model: Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import Op, PatcherError, Point, UsageError, presets
from patcher.bench.engines.architecture import known_sizes
from patcher.hotspot.profile import Counters, Gpu
from patcher.hotspot.rules import rules

REACHABLE = 0.8
"""The fraction of the speed of light that a good kernel reaches."""


Places = Callable[[Op], tuple[tuple[str, ...], str]]
"""Asked for an op: where it can be put in the profiled model, as `engine: point`; and if nowhere,
why, in a clause."""


@dataclass(frozen=True)
class ServedModel:
    """Layers and sizes of the profiled model, as far as they are known."""

    layers: int | None = None
    axes: dict[str, int] | None = None
    """Sizes by the axis names of the op contracts; `tokens` is the batch of a decode step."""
    places: Places | None = None
    """None: what the contracts name, since the model was not asked."""

    @classmethod
    def of(cls, model: str, batch: int | None = None, places: Places | None = None) -> ServedModel:
        """The sizes of a preset, or of a model whose config.json is on this machine; for any other
        name only the batch is known.
        """
        known = presets().get(model)
        batch = batch or (known.batch if known else None)
        tokens = {"tokens": batch} if batch else {}
        if known is None and places is None and not Path(model).exists():
            return cls(axes=tokens or None)
        try:
            sizes = known_sizes(model)
        except PatcherError:  # an engine's own architecture, or a file that is no model
            return cls(axes=tokens or None, places=places)
        return cls(layers=sizes.layers or None, axes=tokens | sizes.axes(), places=places)

    def places_of(self, op: Op | None) -> tuple[tuple[str, ...], str]:
        """See `Places`; nowhere without an op."""
        if op is None:
            return (), ""
        if self.places is not None:
            return self.places(op)
        return tuple(f"{p.engine}: {p.point}" for p in op.contract.patch_points), ""


@dataclass(frozen=True)
class LaunchCost:
    """The memory traffic and arithmetic of one launch."""

    bytes: float | None
    flops: float | None
    source: str
    """`op NAME` or `ncu`."""


def cost_of(op: Op | None, counters: Counters | None, served: ServedModel) -> LaunchCost | None:
    """The cost by the op's contract, else by Nsight Compute's counters; None without either."""
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
    """The longer of memory time and arithmetic time; None if neither peak is known."""
    if gpu is None:
        return None
    times = []
    if cost.bytes and gpu.memory_bytes_per_s:
        times.append(1e9 * cost.bytes / gpu.memory_bytes_per_s)
    if cost.flops and (peak := _tensor_flops(gpu)):
        times.append(1e9 * cost.flops / peak)
    return max(times, default=None)


def completed(gpu: Gpu | None) -> Gpu | None:
    """The GPU with missing peaks filled in from `gpus.toml`."""
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
