"""Baselines: vLLM's two kernels, flashinfer's norm after a gather, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place, or returns
(residual, output).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Any]


def _eager(
    ids: Tensor, table: Tensor, weight: Tensor, residual: Tensor, output: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    rows = embedding(ids, table)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return rows, (weight * wide).to(rows.dtype)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def _with(norm: Callable[[Tensor, Tensor, Tensor, float], object]) -> Baseline:
    def run(
        ids: Tensor, table: Tensor, weight: Tensor, residual: Tensor, output: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        if weight.dtype != table.dtype:
            raise ImportError("the engine's norm wants the weight in the dtype of the rows")
        rows = embedding(ids, table)
        norm(output, rows, weight, epsilon)
        return rows, output

    return run


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0: UnquantizedEmbeddingMethod.embedding, then RMSNorm.forward_cuda's kernel."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops as ops

    return _with(ops.rms_norm)


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.norm import rmsnorm

    def norm(output: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> None:
        rmsnorm(rows, weight, epsilon, out=output)

    return _with(norm)


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
