"""Baselines: vLLM's Triton experts, the grouped and the batched matmul of transformers,
torch.compile, eager.

A factory raises ImportError with the reason where the baseline does not run. A baseline returns
(output,). flashinfer's cutlass_fused_moe is none: it takes up before gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _eager(*tensors: Tensor) -> tuple[Tensor]:
    x, gate_up, down, gains, ids, _ = tensors
    # every expert for every token, so that no size depends on the router
    gate, up = (x @ gate_up.flatten(0, 1).T).unflatten(1, (len(down), -1)).chunk(2, 2)
    inner = torch.nn.functional.silu(gate) * up
    rows = torch.bmm(inner.transpose(0, 1), down.transpose(1, 2))
    chosen = ids.unsqueeze(2) == torch.arange(len(down), device=x.device)
    weights = (gains.float().unsqueeze(2) * chosen).sum(1)
    return ((rows.float() * weights.T.unsqueeze(2)).sum(0).to(x.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def batched(device: str) -> Baseline:
    """transformers 5.23.0: what `batched_mm` computes, which `generate` takes on a GPU."""

    def run(*tensors: Tensor) -> tuple[Tensor]:
        x, gate_up, down, gains, ids, _ = tensors
        top_k = ids.shape[1]
        there = (ids >= 0) & (ids < len(down))
        flat = ids.clamp(0, len(down) - 1).view(-1)
        both = torch.bmm(gate_up[flat], x.repeat_interleave(top_k, 0).unsqueeze(-1)).squeeze(-1)
        gate, up = both.chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        rows = torch.bmm(down[flat], inner.unsqueeze(-1)).view(len(x), top_k, -1)
        weighed = rows * gains.masked_fill(~there, 0.0).unsqueeze(2)
        return (weighed.sum(1).to(x.dtype),)

    return run


def grouped(device: str) -> Baseline:
    """transformers 5.23.0: what `grouped_mm` computes, its choice for a prompt."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise ImportError("PyTorch has no grouped_mm before 2.10")
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        raise ImportError("grouped_mm needs compute capability 8.0")
    multiply = torch.nn.functional.grouped_mm

    def run(*tensors: Tensor) -> tuple[Tensor]:
        x, gate_up, down, gains, ids, _ = tensors
        count, top_k = len(down), ids.shape[1]
        known = torch.where((ids >= 0) & (ids < count), ids, count).view(-1)
        sorted_ids, order = known.sort()
        counted = sorted_ids.float() if device == "cpu" else sorted_ids.int()
        ends = torch.histc(counted, bins=count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        both = multiply(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        rows = multiply(inner, down.transpose(1, 2), offs=ends)
        weighed = rows * gains.view(-1)[order].unsqueeze(1)
        weighed = weighed.masked_fill((sorted_ids == count).unsqueeze(1), 0.0)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return (weighed[back].view(len(x), top_k, -1).sum(1).to(x.dtype),)

    return run


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0: what its Triton backend of experts without a quantisation computes."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def run(*tensors: Tensor) -> tuple[Tensor]:
        x, gate_up, down, gains, ids, _ = tensors
        found: Tensor = fused_experts(x, gate_up, down, gains.float(), ids.int())
        return (found,)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "grouped_mm": grouped,
    "batched_mm": batched,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick of a candidate's error."""
