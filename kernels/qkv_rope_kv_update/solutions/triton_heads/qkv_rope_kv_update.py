# Op: qkv_rope_kv_update: projection to query, key and value (row of weight times x, plus bias),
#   NeoX rotation of query and key by cos_sin[positions], key and value into the paged cache at
#   slots (-1: none); float32, rounded once.
# Arguments: x[T: tokens, inner], weight[T: (q_heads + 2 * kv_heads) * head_dim, inner], bias[T:
#   biased * (q_heads + 2 * kv_heads) * head_dim], positions[P: tokens], cos_sin[C: positions,
#   head_dim], slots[P: tokens], query[T: tokens, q_heads * head_dim], key_cache[T: blocks,
#   block_size, kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim]; T:
#   bfloat16 or float16 or float32; C: T or float32; P: int64
# Writes: query, key_cache, value_cache
# Needs: a GPU that Triton drives; tokens at most 64; x, weight and table contiguous; any stride of
#   the query's rows; caches of any strides with dense heads; graph-safe.
# Idea: one launch in place of two or three. A program has up to 16 pairs of one head for all
#   tokens, both halves as two accumulators of tl.dot, so that the rotation needs no other program,
#   and the weight is read once. Nothing was tuned beyond the tile.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: b7655c870d7693e3424985fbedd73bc11efd858490bf282394723252d97f6e15

import torch
import triton
import triton.language as tl


@triton.jit
def qkv_rope_kv_update_kernel(
    x_ptr, weight_ptr, bias_ptr, positions_ptr, cos_sin_ptr, slots_ptr,
    query_ptr, key_cache_ptr, value_cache_ptr, query_stride,
    key_block_stride, key_place_stride, key_head_stride,
    value_block_stride, value_place_stride, value_head_stride,
    tokens, inner, q_heads, kv_heads, block_size,
    BIASED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)  # columns of the head's first half
    ours = pair < HALF
    row = tl.arange(0, ROWS)
    real = row < tokens
    column = head * 2 * HALF + pair
    first = tl.zeros((ROWS, PAIRS), tl.float32)
    second = tl.zeros((ROWS, PAIRS), tl.float32)
    for begin in range(0, inner, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        deep = k < inner
        left_at = x_ptr + row[:, None] * inner + k[None, :]
        left = tl.load(left_at, mask=real[:, None] & deep[None, :], other=0.0)
        right_at = weight_ptr + column[None, :].to(tl.int64) * inner + k[:, None]
        there = ours[None, :] & deep[:, None]
        a = tl.load(right_at, mask=there, other=0.0)
        b = tl.load(right_at + HALF * inner, mask=there, other=0.0)
        first = tl.dot(left, a, first, input_precision="ieee")
        second = tl.dot(left, b, second, input_precision="ieee")
    if BIASED:
        first += tl.load(bias_ptr + column, mask=ours, other=0.0).to(tl.float32)[None, :]
        second += tl.load(bias_ptr + column + HALF, mask=ours, other=0.0).to(tl.float32)[None, :]
    inside = real[:, None] & ours[None, :]
    if head < q_heads + kv_heads:
        position = tl.load(positions_ptr + row, mask=real, other=0)
        table = cos_sin_ptr + position[:, None] * 2 * HALF + pair[None, :]
        cos = tl.load(table, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(table + HALF, mask=inside, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    low = first.to(query_ptr.dtype.element_ty)
    high = second.to(query_ptr.dtype.element_ty)
    if head < q_heads:
        to_query = query_ptr + row[:, None].to(tl.int64) * query_stride + column[None, :]
        tl.store(to_query, low, mask=inside)
        tl.store(to_query + HALF, high, mask=inside)
    else:
        slot = tl.load(slots_ptr + row, mask=real, other=-1)
        kept = inside & (slot >= 0)[:, None]
        slot = tl.maximum(slot, 0)
        block, place = slot // block_size, slot % block_size  # int64, as is what they scale
        if head < q_heads + kv_heads:
            kv_head = (head - q_heads).to(tl.int64)
            at = key_cache_ptr + block * key_block_stride + place * key_place_stride
            at += kv_head * key_head_stride
        else:
            kv_head = (head - q_heads - kv_heads).to(tl.int64)
            at = value_cache_ptr + block * value_block_stride + place * value_place_stride
            at += kv_head * value_head_stride
        to = at[:, None] + pair[None, :]
        tl.store(to, low, mask=kept)
        tl.store(to + HALF, high, mask=kept)


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
    tokens, inner = x.shape
    _, block_size, kv_heads, head_dim = key_cache.shape
    q_heads, half = query.shape[1] // head_dim, head_dim // 2
    grid = q_heads + 2 * kv_heads, triton.cdiv(half, 16)
    qkv_rope_kv_update_kernel[grid](
        x, weight, bias, positions, cos_sin, slots, query, key_cache, value_cache,
        query.stride(0), *key_cache.stride()[:3], *value_cache.stride()[:3],
        tokens, inner, q_heads, kv_heads, block_size,
        BIASED=bias.numel() > 0, HALF=half, PAIRS=16, ROWS=max(16, triton.next_power_of_2(tokens)),
        DEPTH=64 if x.dtype == torch.float32 else 128, num_warps=4, num_stages=4,
    )  # fmt: skip
