# Op: qkv_rope_kv_update: projection to query, key and value (row of weight times x, plus bias),
#   NeoX rotation of query and key by cos_sin[positions], key and value into the paged cache at
#   slots (-1: none); float32, rounded once.
# Arguments: x[T: tokens, inner], weight[T: (q_heads + 2 * kv_heads) * head_dim, inner], bias[T:
#   biased * (q_heads + 2 * kv_heads) * head_dim], positions[P: tokens], cos_sin[C: positions,
#   head_dim], slots[P: tokens], query[T: tokens, q_heads * head_dim], key_cache[T: blocks,
#   block_size, kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim]; T:
#   bfloat16 or float16 or float32; C: T or float32; P: int64
# Writes: query, key_cache, value_cache
# Needs: PyTorch alone; shipped for the CPU; any size; any stride of the query's rows; caches of any
#   strides with dense heads.
# Idea: one float32 matmul, rotation by halves, an indexed write of those tokens that have a slot.
#   It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 7eb3cd3e6bdf516903ca36ed35c7ffd060c53a46559007837fef179ed2492332

import torch


def rotated(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def qkv_rope_kv_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    rows = x.float() @ weight.float().T
    if bias.numel():
        rows += bias.float()
    heads = rows.view(len(x), -1, head_dim)
    turned = rotated(heads[:, :-kv_heads], cos_sin[positions].float())
    query.copy_(turned[:, :-kv_heads].reshape(query.shape))
    there = slots >= 0
    block, offset = slots[there] // block_size, slots[there] % block_size
    key_cache[block, offset] = turned[:, -kv_heads:][there].to(key_cache.dtype)
    value_cache[block, offset] = heads[:, -kv_heads:][there].to(value_cache.dtype)
