"""Baselines: the backends of vLLM 0.33.0 (v1/attention/backends/mla), torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns (out,). flashinfer's
BatchMLAPagedAttentionWrapper is none: it plans a call on the host, from the lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Any]


def _eager(
    query: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, scale: float
) -> tuple[Tensor]:
    rows = cache[block_table.long().clamp_min(0)].flatten(1, 2)
    there = torch.arange(rows.shape[1], device=query.device) < lengths.unsqueeze(1)
    # rows of other places may be anything, NaN included
    rows = rows.where(there.unsqueeze(2), 0).float()
    scores = query.float() @ rows.mT * scale
    weights = scores.masked_fill(~there.unsqueeze(1), -torch.inf).softmax(-1)
    found = weights.to(query.dtype).float() @ rows[..., : out.shape[2]]
    return (found.where(lengths.view(-1, 1, 1) > 0, 0).to(query.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """FlashAttnMLAImpl.forward_mqa, vLLM's first choice on Hopper."""
    if device != "cuda":
        raise ImportError("FlashAttention needs a CUDA device")
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def run(
        query: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, scale: float
    ) -> tuple[Tensor]:
        _narrow(query)
        latent, rows = out.shape[2], cache.unsqueeze(2)
        found: Tensor = flash_attn_varlen_func(
            q=query[..., latent:],
            k=rows[..., latent:],
            v=rows[..., :latent],
            q_v=query[..., :latent],
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(len(query) + 1, dtype=torch.int32, device=query.device),
            max_seqlen_k=block_table.shape[1] * cache.shape[1],
            seqused_k=lengths,
            block_table=block_table,
            softmax_scale=scale,
            causal=True,
            fa_version=3,
        )
        return (found,)

    return run


def flashmla(device: str) -> Baseline:
    """FlashMLAImpl.forward_mqa; an engine schedules once a step, this once a call."""
    if device != "cuda":
        raise ImportError("FlashMLA needs a CUDA device")
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    def run(
        query: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, scale: float
    ) -> tuple[Tensor]:
        _narrow(query)
        if out.shape[2] != 512 or cache.shape[1:] != (64, 576):
            raise ImportError("FlashMLA has 512 and 64 numbers, in blocks of 64")
        found, _ = flash_mla_with_kvcache(
            q=query.unsqueeze(1),
            k_cache=cache.unsqueeze(2),
            block_table=block_table,
            cache_seqlens=lengths,
            head_dim_v=512,
            tile_scheduler_metadata=get_mla_metadata()[0],
            softmax_scale=scale,
            causal=True,
        )
        return (found.squeeze(1),)

    return run


def _narrow(query: Tensor) -> None:
    if query.dtype is torch.float32:
        raise ImportError("the engine's kernel has no float32")


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashmla": flashmla,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
