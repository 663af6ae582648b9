"""Baselines: the engines' own kernels, torch.compile, and transformers' eager code.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place, or returns (query,
key) without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Any]

_ROWS = 65536
"""Positions made once, as an engine has them before the call."""


def _eager(
    query: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    # transformers 5.17 to 5.23: Qwen3Attention.forward, rounded once as the contract says
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)

    def turned(rows: Tensor, weight: Tensor) -> Tensor:
        heads = rows.float().unflatten(1, (-1, weight.shape[0]))
        heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + epsilon)
        first, second = (heads * weight.float()).chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return rotated.flatten(1).to(rows.dtype)

    return turned(query, q_weight), turned(key, k_weight)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    # what vLLM runs unless its pass `enable_qk_norm_rope_fusion` is on: Inductor's kernels
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def transformers(device: str) -> Baseline:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    def run(
        query: Tensor,
        key: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        # as it has it: the norm is rounded before it is rotated
        if cos_sin.dtype != query.dtype:
            raise ImportError("transformers makes cosines in the dtype of the query")

        def normal(rows: Tensor, weight: Tensor) -> Tensor:
            heads = rows.float().unflatten(1, (-1, weight.shape[0]))
            heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + epsilon)
            return weight * heads.to(rows.dtype)

        cos, sin = (torch.cat((half, half), -1) for half in cos_sin.chunk(2, -1))
        heads = normal(query, q_weight), normal(key, k_weight)
        found: tuple[Tensor, Tensor] = apply_rotary_pos_emb(*heads, cos, sin)
        return found[0].flatten(1), found[1].flatten(1)

    return run


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0's fused kernel, once for the query and once for the key.

    The engine has both in one tensor and launches it once.
    """
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops as ops

    positions = torch.arange(_ROWS, device=device)

    def run(
        query: Tensor,
        key: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin: Tensor,
        epsilon: float,
    ) -> None:
        dim, rows = q_weight.shape[0], positions[: query.shape[0]]
        if query.dtype is torch.float32 or dim not in (64, 128, 256):
            raise ImportError("vLLM's kernel is for 16 bits and heads of 64, 128 or 256")
        if not (query.is_contiguous() and key.is_contiguous()):
            raise ImportError("vLLM's kernel takes rows without a gap")
        for heads, weight in ((query, q_weight), (key, k_weight)):
            count = heads.shape[1] // dim
            ops.fused_qk_norm_rope(
                heads, count, 0, 0, dim, epsilon, weight, weight, cos_sin, True, rows
            )

    return run


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernels need a CUDA device")
    from flashinfer.norm import rmsnorm
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    positions = torch.arange(_ROWS, device=device)

    def run(
        query: Tensor,
        key: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin: Tensor,
        epsilon: float,
    ) -> None:
        if cos_sin.dtype is not torch.float32:
            raise ImportError("flashinfer's kernel wants the table in float32")
        if not (query.is_contiguous() and key.is_contiguous()):
            raise ImportError("the heads of a row with a gap are no rows for flashinfer's norm")
        for rows, weight in ((query, q_weight), (key, k_weight)):
            heads = rows.view(-1, weight.shape[0])
            rmsnorm(heads, weight, epsilon, out=heads)
        at = positions[: query.shape[0]]
        apply_rope_with_cos_sin_cache_inplace(at, query, key, q_weight.shape[0], cos_sin)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "transformers": transformers,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
