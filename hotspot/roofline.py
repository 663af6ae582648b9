"""The speed of light: the least time that a kernel's bytes and FLOPs take on a GPU.

Roofline model: Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from patcher.bench import Op, Point, UsageError, presets
from patcher.bench.engines.architecture import config_file, read_config
from patcher.hotspot.profile import Counters, Gpu
from patcher.hotspot.rules import rules

REACHABLE = 0.8
"""The fraction of the speed of light that a good kernel reaches."""


_SIZES = {
    "hidden": "hidden_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
}
"""What Hugging Face configurations call the axes of op contracts."""


@dataclass(frozen=True)
class ServedModel:
    """Layers and sizes of the profiled model, as far as they are known."""

    layers: int | None = None
    axes: dict[str, int] | None = None
    """Sizes by the axis names of the op contracts; `tokens` is the batch of a decode step."""
    family: str | None = None
    """The `model_type` of its configuration, or what its name says; None if unknown."""

    @classmethod
    def of(cls, model: str, batch: int | None = None) -> ServedModel:
        """The sizes of a preset, or of a config.json on this machine; for any other model only the
        batch is known.
        """
        known, file = presets().get(model), config_file(model)
        batch = batch or (known.batch if known else None)
        tokens = {"tokens": batch} if batch else {}
        if known is not None:
            config = known.config
        elif file is not None:
            config = read_config(file)
            config = config.get("text_config") or config
        else:
            return cls(axes=tokens or None, family=_family(model, None))
        named = {axis: config.get(name) for axis, name in _SIZES.items()}
        sizes = {axis: size for axis, size in named.items() if isinstance(size, int)}
        return cls(
            layers=config.get("num_hidden_layers"),
            axes=tokens | sizes,
            family=_family(model, config.get("model_type")),
        )


def _family(model: str, model_type: object) -> str | None:
    if isinstance(model_type, str):
        return model_type
    return "gpt_oss" if re.search(r"gpt[-_]?oss", model, re.IGNORECASE) else None


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


def _tensor_flops(gpu: Gpu) -> float | None:
    row = _row(gpu) or {}
    per_clock = row.get("tensor_flops_per_sm_and_clock")
    if per_clock is None and not row.get("amd"):
        table = rules("gpus")["tensor_flops_per_sm_and_clock"]
        per_clock = table.get(gpu.compute_capability or "")
    if per_clock is None or not gpu.multiprocessors or not gpu.clock_hz:
        return None
    return float(per_clock) * gpu.multiprocessors * gpu.clock_hz
