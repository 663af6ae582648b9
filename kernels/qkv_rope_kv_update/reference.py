"""qkv_rope_kv_update in plain PyTorch: reference, unchanged elements and control."""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS = 16
"""The number of parts into which the control splits each sum."""


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> dict[str, Tensor]:
    """The float64 values of `query` and of the whole caches.

    Args:
        x: [tokens, inner], any float dtype.
        weight: [(q_heads + 2 * kv_heads) * head_dim, inner], likewise.
        bias: [(q_heads + 2 * kv_heads) * head_dim], or [0] for none.
        positions, slots: [tokens], integers; a slot of -1 is padding.
        cos_sin: [positions, head_dim], cosines then sines.
        query: [tokens, q_heads * head_dim], only written.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
    """
    added = bias.double() if bias.numel() else 0.0
    rows = x.double() @ weight.double().T + added
    return _placed(rows, positions, cos_sin, slots, query, key_cache, value_cache)


def control(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> dict[str, Tensor]:
    """`reference` with running sums and the rotation in bfloat16; other elements are unchanged."""
    added = bias if bias.numel() else weight.new_zeros(len(weight))
    total = added.bfloat16().expand(len(x), -1)
    for left, right in zip(x.chunk(_PARTS, 1), weight.chunk(_PARTS, 1), strict=True):
        total = (total.float() + left.float() @ right.float().T).bfloat16()
    found = _placed(total, positions, cos_sin, slots, query, key_cache, value_cache)
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    stays = kept(slots=slots, **caches)
    written = {
        name: torch.where(stays[name], cache, found[name].to(cache.dtype))
        for name, cache in caches.items()
    }
    return {"query": found["query"].to(query.dtype), **written}


def kept(
    slots: Tensor, key_cache: Tensor, value_cache: Tensor, **others: Tensor
) -> dict[str, Tensor]:
    """Masks of the elements of the caches that no slot refers to."""
    blocks, block_size, _, _ = key_cache.shape
    stays = torch.ones(blocks * block_size, dtype=torch.bool, device=key_cache.device)
    stays[slots[slots >= 0]] = False
    mask = stays.view(blocks, block_size, 1, 1).expand_as(key_cache)
    return {"key_cache": mask, "value_cache": mask}


def _placed(
    rows: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> dict[str, Tensor]:
    """Rotated and written in the dtype of the rows [tokens, (q_heads + 2 * kv_heads) * head_dim]"""
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = rows.view(len(rows), -1, head_dim)
    turned, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
    cos, sin = cos_sin[positions].to(rows.dtype).unsqueeze(1).chunk(2, -1)
    first, second = turned.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    keys, values = (cache.to(rows.dtype, copy=True) for cache in (key_cache, value_cache))
    there = slots >= 0
    block, offset = slots[there] // block_size, slots[there] % block_size
    keys[block, offset] = turned[:, -kv_heads:][there]
    values[block, offset] = value[there]
    rotated = turned[:, :-kv_heads].reshape(query.shape)
    return {"query": rotated, "key_cache": keys, "value_cache": values}
