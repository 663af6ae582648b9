# Op: rope_kv_update: optional bias, NeoX rotation of query in place, rotated key and value into the
#   paged cache at slots (-1: none); float32, rounded once.
# Arguments: positions[P: tokens], query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads *
#   head_dim], value[T: tokens, kv_heads * head_dim], bias[T: biased * (q_heads + 2 * kv_heads) *
#   head_dim], cos_sin[C: positions, head_dim], slots[P: tokens], key_cache[T: blocks, block_size,
#   kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim]; T: bfloat16 or
#   float16 or float32; C: T or float32; P: int64
# Writes: query, key_cache, value_cache
# Needs: a GPU that Triton drives; any stride of rows; caches of any strides with dense heads;
#   graph-safe.
# Idea: one launch in place of two: a program for each token and head, query heads first, then key
#   heads, which take their value along into the cache.
# Made by: hand, as a plain right solution.
# Figures: not measured by itself; with keys and values as one tensor it ran in vLLM in place of
#   vLLM's own: bench/results/vllm-points/README.md.
# Digest: 3cfc137b63a946cb29740e9f3ca2eb79d9532dac412c2ff4923260d6d384eee5

"""rope_kv_update(positions[P: tokens], query[T: tokens, q_heads * head_dim],
key[T: tokens, kv_heads * head_dim], value[T: tokens, kv_heads * head_dim], bias[T: 0 or all],
cos_sin[C: positions, head_dim], slots[P: tokens],
key_cache[T: blocks, block_size, kv_heads, head_dim],
value_cache[T: blocks, block_size, kv_heads, head_dim]).

A program for each token and head, query heads first, then key heads, which take their value along.
float32 arithmetic.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kv_update_kernel(
    positions_ptr, query_ptr, key_ptr, value_ptr, bias_ptr, cos_sin_ptr, slots_ptr,
    key_cache_ptr, value_cache_ptr, query_stride, key_stride, value_stride,
    key_block_stride, key_place_stride, key_head_stride,
    value_block_stride, value_place_stride, value_head_stride,
    q_heads, kv_heads, block_size,
    BIASED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    table = cos_sin_ptr + tl.load(positions_ptr + token) * 2 * HALF + column
    cos = tl.load(table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(table + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < q_heads:
        at = query_ptr + token * query_stride + head * 2 * HALF + column
    else:
        at = key_ptr + token * key_stride + (head - q_heads) * 2 * HALF + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        added = bias_ptr + head * 2 * HALF + column
        first += tl.load(added, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(added + HALF, mask=inside, other=0.0).to(tl.float32)
    a = (first * cos - second * sin).to(query_ptr.dtype.element_ty)
    b = (second * cos + first * sin).to(query_ptr.dtype.element_ty)
    if head < q_heads:
        tl.store(at, a, mask=inside)
        tl.store(at + HALF, b, mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            block, place = slot // block_size, slot % block_size  # int64, as is what they scale
            kv_head = (head - q_heads).to(tl.int64)
            to = key_cache_ptr + block * key_block_stride + place * key_place_stride
            to += kv_head * key_head_stride
            tl.store(to + column, a, mask=inside)
            tl.store(to + HALF + column, b, mask=inside)
            whole = tl.arange(0, 2 * BLOCK)
            fits = whole < 2 * HALF
            source = value_ptr + token * value_stride + (head - q_heads) * 2 * HALF + whole
            value = tl.load(source, mask=fits, other=0.0).to(tl.float32)
            if BIASED:
                more = bias_ptr + (head + kv_heads) * 2 * HALF + whole
                value += tl.load(more, mask=fits, other=0.0).to(tl.float32)
            to = value_cache_ptr + block * value_block_stride + place * value_place_stride
            to += kv_head * value_head_stride
            tl.store(to + whole, value.to(query_ptr.dtype.element_ty), mask=fits)


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
    _, block_size, kv_heads, head_dim = key_cache.shape
    tokens, q_heads = query.shape[0], query.shape[1] // head_dim
    half = head_dim // 2
    rope_kv_update_kernel[(tokens, q_heads + kv_heads)](
        positions, query, key, value, bias, cos_sin, slots, key_cache, value_cache,
        query.stride(0), key.stride(0), value.stride(0),
        *key_cache.stride()[:3], *value_cache.stride()[:3], q_heads, kv_heads, block_size,
        BIASED=bias.numel() > 0, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
