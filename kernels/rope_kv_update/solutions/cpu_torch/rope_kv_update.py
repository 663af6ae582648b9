# Op: rope_kv_update: optional bias, NeoX rotation of query in place, rotated key and value into the
#   paged cache at slots (-1: none); float32, rounded once.
# Arguments: positions[P: tokens], query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads *
#   head_dim], value[T: tokens, kv_heads * head_dim], bias[T: biased * (q_heads + 2 * kv_heads) *
#   head_dim], cos_sin[C: positions, head_dim], slots[P: tokens], key_cache[T: blocks, block_size,
#   kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim]; T: bfloat16 or
#   float16 or float32; C: T or float32; P: int64
# Writes: query, key_cache, value_cache
# Needs: PyTorch alone; shipped for the CPU; any stride of rows; caches of any strides with dense
#   heads.
# Idea: rotation by halves in float32 and an indexed write of those tokens that have a slot. It is
#   here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: df85c5312fb7d8ad59b770f4cc3cc52a168aba85e4b612f85d8168297d631e5d

import torch


def rotated(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = rows.view(len(rows), -1, cos_sin.shape[-1]).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope_kv_update(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    block_size, heads, head_dim = key_cache.shape[1:]
    table = cos_sin[positions].float()
    q, k, v = query.float(), key.float(), value.float()
    if bias.numel():
        sizes = [query.shape[1], key.shape[1], value.shape[1]]
        q, k, v = (each + b for each, b in zip((q, k, v), bias.float().split(sizes), strict=True))
    query.copy_(rotated(q, table).view(query.shape))
    there = slots >= 0
    block, offset = slots[there] // block_size, slots[there] % block_size
    key_cache[block, offset] = rotated(k, table)[there].to(key_cache.dtype)
    value_cache[block, offset] = v.view(-1, heads, head_dim)[there].to(value_cache.dtype)
