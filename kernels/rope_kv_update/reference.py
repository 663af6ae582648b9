"""rope_kv_update in plain PyTorch: reference, unchanged elements and control."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> dict[str, Tensor]:
    """The float64 values of `query` and of the whole caches.

    Args:
        positions, slots: [tokens], integers; a slot of -1 is padding.
        query: [tokens, q_heads * head_dim], any float dtype.
        key, value: [tokens, kv_heads * head_dim], any float dtype.
        bias: [(q_heads + 2 * kv_heads) * head_dim], or [0] for none.
        cos_sin: [positions, head_dim], cosines then sines.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
    """
    wide = torch.float64
    caches = key_cache, value_cache
    return _computed(positions, query, key, value, bias, cos_sin, slots, *caches, wide)


def control(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> dict[str, Tensor]:
    """`reference` with products and sums rounded to bfloat16; other elements are unchanged."""
    narrow, caches = torch.bfloat16, {"key_cache": key_cache, "value_cache": value_cache}
    found = _computed(
        positions, query, key, value, bias, cos_sin, slots, key_cache, value_cache, narrow
    )
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


def _computed(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    block_size, heads, head_dim = key_cache.shape[1:]
    parts = [each.to(dtype) for each in (query, key, value)]
    if bias.numel():
        sizes = [each.shape[1] for each in parts]
        added = bias.to(dtype).split(sizes)
        parts = [part + each for part, each in zip(parts, added, strict=True)]
    cos, sin = cos_sin[positions].to(dtype).unsqueeze(1).chunk(2, -1)
    rotated = []
    for part in parts[:2]:
        first, second = part.view(len(part), -1, head_dim).chunk(2, -1)
        rotated.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    keys, values = (cache.to(dtype, copy=True) for cache in (key_cache, value_cache))
    there = slots >= 0
    block, offset = slots[there] // block_size, slots[there] % block_size
    keys[block, offset] = rotated[1][there]
    values[block, offset] = parts[2].view(-1, heads, head_dim)[there]
    return {
        "query": rotated[0].reshape(query.shape),
        "key_cache": keys,
        "value_cache": values,
    }
