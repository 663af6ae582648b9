"""The speed of light: the least time that a kernel's bytes and FLOPs take on a GPU.

Roofline model: Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patcher.bench import Op, PatcherError, Point, UsageError, dtypes_in, presets
from patcher.bench.engines.architecture import known_sizes
from patcher.hotspot.names import is_within, sizes_in
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
    """None: the model cannot be asked, only its name."""
    dtype: str | None = None
    """Of weights and activations; None: that of the op's sweep."""
    name: str = field(default="", compare=False)
    """As a person wrote it."""

    @classmethod
    def of(cls, model: str, batch: int | None = None, places: Places | None = None) -> ServedModel:
        """The sizes of a preset, or of a model whose config.json is on this machine; for any other
        name only the batch is known.
        """
        known = presets().get(model)
        batch = batch or (known.batch if known else None)
        tokens = {"tokens": batch} if batch else {}
        if known is None and places is None and not Path(model).exists():
            return cls(axes=tokens or None, name=model)
        try:
            sizes = known_sizes(model)
        except PatcherError:  # an engine's own architecture, or a file that is no model
            return cls(axes=tokens or None, places=places, name=model)
        axes = tokens | sizes.axes()
        return cls(layers=sizes.layers or None, axes=axes, places=places, name=model)

    def places_of(self, op: Op | None) -> tuple[tuple[str, ...], str]:
        """See `Places`; nowhere without an op. Where the model cannot be asked, a point that is
        named for an architecture (`gpt_oss.router`) is only for models named so."""
        if op is None:
            return (), ""
        if self.places is not None:
            return self.places(op)
        known = {preset.architecture for preset in presets().values()}
        name, points, refusal = _bare(self.name), [], ""
        for spec in op.contract.patch_points:
            alone = spec.point.partition(".")[0]
            if alone in known and _bare(alone) not in name:
                refusal = f"{spec.point} is of {alone} alone"
            else:
                points.append(f"{spec.engine}: {spec.point}")
        return tuple(points), "" if points else refusal


def _bare(name: str) -> str:
    """Lower-case letters and digits alone: `gptoss20b`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class LaunchCost:
    """The memory traffic and arithmetic of one launch."""

    bytes: float | None
    flops: float | None
    source: str
    """`op NAME` or `ncu`."""


def cost_of(
    op: Op | None, counters: Counters | None, served: ServedModel, row: str = ""
) -> LaunchCost | None:
    """The cost by the op's contract, else by Nsight Compute's counters; None without either.

    Args:
        op: the op that computes what the kernel does.
        counters: of Nsight Compute.
        served: the model.
        row: the kernel's name; that of a norm within a part of a layer says its own sizes.
    """
    within, sizes = is_within(row), sizes_in(row)
    if op is not None and served.axes and "tokens" in served.axes and (sizes or not within):
        try:
            sweep = op.sweep("cuda")
        except UsageError:
            sweep = None
        if sweep is not None:
            axes = {**sweep.fixed, sweep.axis: served.axes["tokens"]}
            axes |= {name: served.axes[name] for name in sweep.fixed if name in served.axes}
            if sizes is not None:
                axes |= {sweep.axis: sizes[0], "hidden": sizes[1]}
            dtypes = sweep.dtypes
            if served.dtype is not None:
                dtypes = dtypes_in(served.dtype, sweep, op.contract)
            point = Point(axes=axes, dtypes=dtypes)
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
    if cost.flops and (peak := tensor_flops(gpu)):
        times.append(1e9 * cost.flops / peak)
    return max(times, default=None)


def completed(gpu: Gpu | None) -> Gpu | None:
    """The GPU with missing peaks filled in from `gpus.toml`."""
    row = _row(gpu)
    if gpu is None or row is None:
        return gpu
    known = {"memory_bytes_per_s": row["memory_bytes_per_s"], "clock_hz": row["clock_hz"]}
    missing = {key: value for key, value in known.items() if getattr(gpu, key) is None}
    return gpu.model_copy(update=missing)


def named_by_size(
    name: str, multiprocessors: int | None, capability: str | None, memory: int | None
) -> str:
    """The name of a GPU that its driver leaves empty or general, by what it has.

    Args:
        name: as the source gives it.
        multiprocessors: multiprocessors or compute units.
        capability: compute capability; `9.4` is gfx942.
        memory: bytes of device memory.
    """
    if name and not re.fullmatch(rules("gpus")["general_names"], name):
        return name
    for row in rules("gpus")["size"]:
        if (
            row["multiprocessors"] == multiprocessors
            and row["compute_capability"] == capability
            and memory is not None
            and row["least_memory_bytes"] <= memory < row["most_memory_bytes"]
        ):
            return str(row["name"])
    return name


def _row(gpu: Gpu | None) -> dict[str, Any] | None:
    if gpu is None:
        return None
    return next((row for row in rules("gpus")["gpu"] if re.search(row["name"], gpu.name)), None)


@dataclass(frozen=True)
class CopyRate:
    """What a GPU's memory gives to a kernel, and how that is known."""

    bytes_per_s: float
    source: str


def copy_rate(gpu: Gpu | None) -> CopyRate | None:
    """The rate that a copy reaches; else the peak of the data sheet or driver, which none reaches.

    A rate in `gpus.toml` comes before one that was measured here, so that ledgers compare.
    """
    row, known = _row(gpu) or {}, completed(gpu)
    if known is None:
        return None
    if "copied_bytes_per_s" in row:
        return CopyRate(float(row["copied_bytes_per_s"]), "reached by a copy, by gpus.toml")
    from patcher.bench.judge.ceilings import remembered_ceilings

    if (here := remembered_ceilings(known.name)) is not None:
        return CopyRate(1e9 * here.memory_gb_s, "reached by a copy on this machine")
    if known.memory_bytes_per_s:
        return CopyRate(known.memory_bytes_per_s, "the peak, since no copy was measured")
    return None


def tensor_flops(gpu: Gpu) -> float | None:
    """Dense operations per second in 16 bits; None if the GPU is not known well enough."""
    row = _row(gpu) or {}
    per_clock = row.get("tensor_flops_per_sm_and_clock")
    if per_clock is None and not row.get("amd"):
        table = rules("gpus")["tensor_flops_per_sm_and_clock"]
        per_clock = table.get(gpu.compute_capability or "")
    if per_clock is None or not gpu.multiprocessors or not gpu.clock_hz:
        return None
    return float(per_clock) * gpu.multiprocessors * gpu.clock_hz
