"""Baselines: FlashAttention as vLLM calls it, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    tokens, pages = block_table.shape
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = query.reshape(tokens, kv_heads, -1, head_dim)
    table = block_table.long().clamp_min(0)
    keys, values = (
        cache[table].reshape(tokens, pages * block_size, kv_heads, head_dim).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    places = torch.arange(pages * block_size, device=query.device)
    length = lengths.unsqueeze(1)
    there = places < length
    if window.numel():
        there = there & (places >= length - window)
    # keys and values of other places may be anything, NaN included
    seen = there[:, None, :, None]
    keys, values = keys.where(seen, 0), values.where(seen, 0)
    scores = (heads.float() @ keys.float().transpose(2, 3)) * scale
    scores = scores.masked_fill(~there[:, None, None], -torch.inf)
    if sinks.numel():
        more = sinks.float().view(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, more), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    found = weights.to(query.dtype).float() @ values.float()
    return found.where(length.view(tokens, 1, 1, 1) > 0, 0).to(query.dtype).view(tokens, -1)


def _with(attend: Callable[..., Tensor]) -> Baseline:
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        window: Tensor,
        sinks: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        out.copy_(attend(query, key_cache, value_cache, block_table, lengths, window, sinks, scale))

    return run


def eager(device: str) -> Baseline:
    return _with(_attend)


def compiled(device: str) -> Baseline:
    return _with(torch.compile(_attend, dynamic=True))


def vllm(device: str) -> Baseline:
    """vLLM 0.25.1 to 0.33.0, v1/attention/backends/flash_attn.py, FlashAttentionImpl.forward."""
    if device != "cuda":
        raise ImportError("FlashAttention needs a CUDA device")
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version()
    sizes: list[int] = []
    """The window, once known: FlashAttention takes a number, and all that are timed have one."""

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        window: Tensor,
        sinks: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        if query.dtype is torch.float32:
            raise ImportError("FlashAttention has no float32")
        if sinks.numel() and version != 3:
            raise ImportError("sinks need FlashAttention 3")
        tokens, (head_dim,) = len(query), key_cache.shape[3:]
        left = -1
        if window.numel():
            if not sizes:
                sizes.append(int(window))
            left = sizes[0] - 1
        flash_attn_varlen_func(
            q=query.view(tokens, -1, head_dim),
            k=key_cache,
            v=value_cache,
            out=out.view(tokens, -1, head_dim),
            cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=query.device),
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=block_table.shape[1] * key_cache.shape[1],
            softmax_scale=scale,
            causal=True,
            window_size=[left, 0 if window.numel() else -1],
            block_table=block_table,
            fa_version=version,
            s_aux=sinks if sinks.numel() else None,
        )

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
