"""qkv_rope_kv_update in plain PyTorch: reference, unchanged elements and control."""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS = 16
"""The number of parts into which the control splits each sum of the projection."""


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, query: Tensor, key_cache: Tensor, **rest: Tensor
) -> dict[str, Tensor]:
    """The float64 values of `query` and of the whole caches.

    Args:
        x: [tokens, inner], any float dtype.
        weight: [(q_heads + 2 * kv_heads) * head_dim, inner], likewise.
        bias: [(q_heads + 2 * kv_heads) * head_dim], or [0] for none.
        query: [tokens, q_heads * head_dim], only written.
        key_cache: [blocks, block_size, kv_heads, head_dim].
        rest: positions, cos_sin, slots and value_cache, as in rope_kv_update.
    """
    added = bias.double() if bias.numel() else 0.0
    row = x.double() @ weight.double().T + added
    return _stored(row, query, key_cache, **rest)


def control(
    x: Tensor, weight: Tensor, bias: Tensor, query: Tensor, key_cache: Tensor, **rest: Tensor
) -> dict[str, Tensor]:
    """`reference` with running sums and the rotation in bfloat16; other elements are unchanged."""
    added = bias if bias.numel() else weight.new_zeros(len(weight))
    row = added.bfloat16().expand(len(x), len(weight))
    for left, right in zip(x.chunk(_PARTS, 1), weight.chunk(_PARTS, 1), strict=True):
        row = (row.float() + left.float() @ right.float().T).bfloat16()
    found = _stored(row, query, key_cache, **rest)
    caches = {"key_cache": key_cache, "value_cache": rest["value_cache"]}
    stays = kept(slots=rest["slots"], **caches)
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


def _stored(
    row: Tensor,
    query: Tensor,
    key_cache: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    value_cache: Tensor,
) -> dict[str, Tensor]:
    """Rotate and store what was projected, in the dtype of `row`."""
    block_size, heads, head_dim = key_cache.shape[1:]
    parts = row.split([query.shape[1], heads * head_dim, heads * head_dim], 1)
    cos, sin = cos_sin[positions].to(row.dtype).unsqueeze(1).chunk(2, -1)
    rotated = []
    for part in parts[:2]:
        first, second = part.reshape(len(part), -1, head_dim).chunk(2, -1)
        rotated.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    keys, values = (cache.to(row.dtype, copy=True) for cache in (key_cache, value_cache))
    there = slots >= 0
    block, offset = slots[there] // block_size, slots[there] % block_size
    keys[block, offset] = rotated[1][there]
    values[block, offset] = parts[2].reshape(-1, heads, head_dim)[there]
    return {
        "query": rotated[0].reshape(query.shape),
        "key_cache": keys,
        "value_cache": values,
    }
