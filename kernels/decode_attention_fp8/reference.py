"""decode_attention_fp8 in plain PyTorch: reference and control."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    out: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """The float64 values of `out`, [tokens, group * kv_heads * head_dim].

    Args:
        query: [tokens, group * kv_heads * head_dim], in fp8 or any float dtype.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim] in fp8.
        q_scale: [1], or [0] for 1.
        k_scale, v_scale: [1].
        block_table: [tokens, pages], integers.
        lengths: [tokens], integers.
        window: [1], an integer, or [0] for none.
        sinks: [group * kv_heads], or [0] for none.
        scale: of the scores.
    """
    wide, heads = torch.float64, _scaled(query, q_scale, torch.float64)
    caches = (key_cache, k_scale), (value_cache, v_scale)
    return {"out": _computed(heads, *caches, block_table, lengths, window, sinks, scale, wide)}


def control(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    out: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """`reference` with numbers, scores, weights and sums rounded to bfloat16."""
    narrow, heads = torch.bfloat16, _scaled(query, q_scale, torch.bfloat16)
    caches = (key_cache, k_scale), (value_cache, v_scale)
    found = _computed(heads, *caches, block_table, lengths, window, sinks, scale, narrow)
    return {"out": found.to(out.dtype)}


def _scaled(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers times their scale, if they have one."""
    wide = numbers.to(dtype)
    return wide * scale.to(dtype) if scale.numel() else wide


def _computed(
    query: Tensor,
    keys_of: tuple[Tensor, Tensor],
    values_of: tuple[Tensor, Tensor],
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    block_size, kv_heads, head_dim = keys_of[0].shape[1:]
    heads = query.view(len(query), kv_heads, -1, head_dim)
    found = torch.zeros_like(heads)
    for token, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        first = max(length - int(window), 0) if window.numel() else 0
        places = torch.arange(first, length, device=query.device)
        blocks = block_table[token].long()[places // block_size]
        keys, values = (
            _scaled(cache[blocks, places % block_size], factor, dtype).transpose(0, 1)
            for cache, factor in (keys_of, values_of)
        )
        scores = heads[token] @ keys.transpose(1, 2) * scale
        if sinks.numel():
            more = sinks.to(dtype).view(kv_heads, -1, 1)
            weights = torch.cat((scores, more), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        found[token] = weights @ values
    return found.view(query.shape)
