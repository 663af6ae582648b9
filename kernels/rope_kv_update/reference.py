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
    kv_cache: Tensor,
) -> dict[str, Tensor]:
    """The float64 values of `query` and of the whole `kv_cache`.

    Args:
        positions, slots: [tokens], integers; a slot of -1 is padding.
        query: [tokens, q_heads * head_dim], any float dtype.
        key, value: [tokens, kv_heads * head_dim], any float dtype.
        bias: [(q_heads + 2 * kv_heads) * head_dim], or [0] for none.
        cos_sin: [positions, head_dim], cosines then sines.
        kv_cache: [blocks, 2, block_size, kv_heads, head_dim], keys at 0, values at 1.
    """
    wide = torch.float64
    return _computed(positions, query, key, value, bias, cos_sin, slots, kv_cache, wide)


def control(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv_cache: Tensor,
) -> dict[str, Tensor]:
    """`reference` with products and sums rounded to bfloat16; other elements are unchanged."""
    narrow = torch.bfloat16
    found = _computed(positions, query, key, value, bias, cos_sin, slots, kv_cache, narrow)
    cache = found["kv_cache"].to(kv_cache.dtype)
    stays = kept(slots=slots, kv_cache=kv_cache)["kv_cache"]
    return {
        "query": found["query"].to(query.dtype),
        "kv_cache": torch.where(stays, kv_cache, cache),
    }


def kept(slots: Tensor, kv_cache: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """A mask of the elements of `kv_cache` that no slot refers to."""
    blocks, _, block_size, _, _ = kv_cache.shape
    stays = torch.ones(blocks * block_size, dtype=torch.bool, device=kv_cache.device)
    stays[slots[slots >= 0]] = False
    return {"kv_cache": stays.view(blocks, 1, block_size, 1, 1).expand_as(kv_cache)}


def _computed(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv_cache: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    block_size, heads, head_dim = kv_cache.shape[2:]
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
    cache = kv_cache.to(dtype, copy=True)
    there = slots >= 0
    block, offset = slots[there] // block_size, slots[there] % block_size
    cache[block, 0, offset] = rotated[1][there]
    cache[block, 1, offset] = parts[2].view(-1, heads, head_dim)[there]
    return {"query": rotated[0].reshape(query.shape), "kv_cache": cache}
