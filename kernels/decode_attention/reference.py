"""decode_attention in plain PyTorch: reference and control."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    out: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """The float64 values of `out`, [tokens, group * kv_heads * head_dim].

    Args:
        query: [tokens, group * kv_heads * head_dim], any float dtype.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
        block_table: [tokens, pages], integers.
        lengths: [tokens], integers.
        window: [1], an integer, or [0] for none.
        sinks: [group * kv_heads], or [0] for none.
        scale: of the scores.
    """
    wide = torch.float64
    return {
        "out": _computed(
            query, key_cache, value_cache, block_table, lengths, window, sinks, scale, wide
        )
    }


def control(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    out: Tensor,
    scale: float,
) -> dict[str, Tensor]:
    """`reference` with scores, weights and sums rounded to bfloat16."""
    found = _computed(
        query,
        key_cache,
        value_cache,
        block_table,
        lengths,
        window,
        sinks,
        scale,
        torch.bfloat16,
    )
    return {"out": found.to(out.dtype)}


def _computed(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = query.view(len(query), kv_heads, -1, head_dim).to(dtype)
    found = torch.zeros_like(heads)
    for token, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        first = max(length - int(window), 0) if window.numel() else 0
        places = torch.arange(first, length, device=query.device)
        blocks = block_table[token].long()[places // block_size]
        keys, values = (
            cache[blocks, places % block_size].to(dtype).transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        scores = heads[token] @ keys.transpose(1, 2) * scale
        if sinks.numel():
            more = sinks.to(dtype).view(kv_heads, -1, 1)
            weights = torch.cat((scores, more), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        found[token] = weights @ values
    return found.view(query.shape)
