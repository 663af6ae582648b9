"""Baselines: what vLLM calls on Hopper and on Blackwell, torch.compile, eager.

A factory raises ImportError with the reason where the baseline does not run. A baseline returns
(out,). flashinfer's BatchMLAPagedAttentionWrapper is none: it plans a call on the host, from the
lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]

_MOST = 65536
"""Requests of a call at most."""


def _eager(*given: Any) -> tuple[Tensor]:
    query, cache, block_table, lengths, out, scale = given
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
    """vLLM 0.33.0, FlashAttnMLAImpl.forward_mqa: its first choice on Hopper, before FlashMLA."""
    if device != "cuda":
        raise ImportError("FlashAttention needs a CUDA device")
    from vllm.vllm_flash_attn import fa_version_unsupported_reason, flash_attn_varlen_func

    if reason := fa_version_unsupported_reason(3):
        raise ImportError(reason)
    # an engine has it before the call
    starts = torch.arange(_MOST + 1, dtype=torch.int32, device=device)

    def run(*given: Any) -> tuple[Tensor]:
        query, cache, block_table, lengths, out, scale = given
        if query.dtype is torch.float32:
            raise ImportError("FlashAttention has no float32")
        latent, rows = out.shape[2], cache.unsqueeze(2)
        found: Tensor = flash_attn_varlen_func(
            q=query[..., latent:],
            k=rows[..., latent:],
            v=rows[..., :latent],
            q_v=query[..., :latent],
            max_seqlen_q=1,
            cu_seqlens_q=starts[: len(query) + 1],
            max_seqlen_k=block_table.shape[1] * cache.shape[1],
            seqused_k=lengths,
            block_table=block_table,
            softmax_scale=scale,
            causal=True,
            fa_version=3,
        )
        return (found,)

    return run


def flashinfer(device: str) -> Baseline:
    """vLLM 0.33.0, FlashInferMLAImpl.forward_mqa: its first choice on Blackwell."""
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    if torch.cuda.get_device_capability()[0] != 10:
        raise ImportError("flashinfer's kernel is for compute capability 10.x")
    workspace = torch.zeros(128 << 20, dtype=torch.int8, device=device)

    def run(*given: Any) -> tuple[Tensor]:
        query, cache, block_table, lengths, out, scale = given
        if query.dtype is torch.float32:
            raise ImportError("flashinfer's kernel has no float32")
        found: Tensor = trtllm_batch_decode_with_kv_cache_mla(
            query=query.unsqueeze(1),
            kv_cache=cache.unsqueeze(1),
            workspace_buffer=workspace,
            qk_nope_head_dim=128,  # of a key before it was absorbed (DeepSeek-V3)
            kv_lora_rank=out.shape[2],
            qk_rope_head_dim=query.shape[2] - out.shape[2],
            block_tables=block_table,
            seq_lens=lengths,
            max_seq_len=block_table.shape[1] * cache.shape[1],
            bmm1_scale=scale,
        )
        return (found.view(out.shape),)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick of a candidate's error."""
