"""Baselines: vLLM's two kernels, flashinfer's norm in place of the second, torch.compile, eager.

A factory raises ImportError with the reason where the baseline does not run. A baseline writes in
place, or returns (residual, output).
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


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0: UnquantizedEmbeddingMethod.embedding, then RMSNorm's kernel."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops as ops

    def run(
        ids: Tensor, table: Tensor, weight: Tensor, residual: Tensor, output: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        if weight.dtype != table.dtype:
            raise ImportError("vLLM's kernel wants the weight in the dtype of the rows")
        rows = embedding(ids, table)
        ops.rms_norm(output, rows, weight, epsilon)
        return rows, output

    return run


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.norm import rmsnorm

    def run(
        ids: Tensor, table: Tensor, weight: Tensor, residual: Tensor, output: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        if weight.dtype != table.dtype:
            raise ImportError("flashinfer's kernel wants the weight in the dtype of the rows")
        rows = embedding(ids, table)
        rmsnorm(rows, weight, epsilon, out=output)
        return rows, output

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick of a candidate's error."""
