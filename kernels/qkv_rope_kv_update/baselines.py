"""Baselines: chains of two kernels, each link that of another op's baselines or solutions.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. As in the engine, the projection makes one
buffer, whose query is rotated where it lies; it is returned without a copy, with both caches.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

_OPS = Path(__file__).parent.parent
_PROJECT = runpy.run_path(str(_OPS / "linear" / "baselines.py"))["BASELINES"]
_ROTATE = runpy.run_path(str(_OPS / "rope_kv_update" / "baselines.py"))["BASELINES"]

Baseline = Callable[..., Any]


def _chain(project: Callable[[Tensor, Tensor, Tensor], Tensor], rotate: Baseline) -> Baseline:
    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_size = key_cache.shape[2] * key_cache.shape[3]
        row = project(x, weight, bias)
        parts = row.split([query.shape[1], kv_size, kv_size], 1)
        none = row.new_empty(0)
        rotate(positions, *parts, none, cos_sin, slots, key_cache, value_cache)
        return parts[0], key_cache, value_cache

    return run


def _by(linear: str, rope: str) -> Callable[[str], Baseline]:
    """The chain of two baselines, by their names."""

    def factory(device: str) -> Baseline:
        projection, rotation = _PROJECT[linear](device), _ROTATE[rope](device)

        def project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            row: Tensor = projection(x, weight, bias, x.new_empty(0))[0]
            return row

        return _chain(project, rotation)

    return factory


def patched(device: str) -> Baseline:
    """The chain of our own kernels for the two ops, those in Triton."""
    if device != "cuda":
        raise ImportError("our kernels in Triton need a CUDA device")
    linear, rope = (
        runpy.run_path(str(_OPS / name / "solutions" / solution / f"{name}.py"))[name]
        for name, solution in (("linear", "triton_tile"), ("rope_kv_update", "triton_tuned"))
    )

    def project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        row = x.new_empty(len(x), len(weight))
        linear(x, weight, bias, row)
        return row

    return _chain(project, rope)


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": _by("eager", "vllm"),
    "patched": patched,
    "flashinfer": _by("eager", "flashinfer"),
    "torch.compile": _by("eager", "torch.compile"),
    "eager": _by("eager", "eager"),
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
