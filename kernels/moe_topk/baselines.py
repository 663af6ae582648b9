"""Baselines: vLLM's kernel, transformers' router, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns (scores,
experts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor], Any]


def _eager(logits: Tensor, scores: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    # a stable sort, since torch.topk does not define the order of equal logits
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = scores.shape[1]
    softmax = torch.softmax(order.values[:, :top_k].float(), 1)
    return softmax.to(scores.dtype), order.indices[:, :top_k].to(experts.dtype)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def topk(device: str) -> Baseline:
    """transformers 5.17 to 5.23, GptOssTopKRouter.forward after its matmul."""

    def run(logits: Tensor, scores: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = torch.topk(logits, scores.shape[1], dim=-1)
        return torch.softmax(values, dim=1, dtype=scores.dtype), chosen.to(experts.dtype)

    return run


def vllm(device: str) -> Baseline:
    """vLLM's kernel, which renormalises; it writes float32."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm import _custom_ops as ops

    def run(logits: Tensor, scores: Tensor, experts: Tensor) -> None:
        if scores.dtype != torch.float32:
            raise ImportError("vLLM's kernel writes weights in float32 alone")
        rows = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
        ops.topk_softmax(scores, experts, rows, logits, True)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "transformers": topk,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
