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
# Idea: one launch in place of vLLM's two. A program has several heads of one token, of queries or
#   of keys with their values: 256 pairs up to 16 tokens, 512 up to 64, then 1024, so that few
#   tokens still fill the GPU. Heads and block size are compiled in, strides are not; the rotated
#   key goes to the cache alone.
# Made by: hand, from candidate 1 of the agent loop's recording
#   bench/results/loop/rope_kv_update-triton, whose caches were one contiguous tensor.
# Figures: not measured since the caches have strides. Before, on an NVIDIA H200: sweep bf16 2.58x
#   against vllm (bench/results/kernels/rope_kv_update-triton_tuned.json.xz).
# Digest: a802b9766191ecaee46101357fcff7f0a23236abec3192dd54f96a4b2fe3ae09

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kv_update_kernel(
    pos_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    cs_ptr,
    slot_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_stride,
    k_stride,
    v_stride,
    k_block_stride,
    k_place_stride,
    k_head_stride,
    v_block_stride,
    v_place_stride,
    v_head_stride,
    QH: tl.constexpr,
    KH: tl.constexpr,
    HD: tl.constexpr,
    HALF: tl.constexpr,
    HALFP: tl.constexpr,
    BS: tl.constexpr,
    QB: tl.constexpr,
    KB: tl.constexpr,
    KG: tl.constexpr,
    BIASED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    pos = tl.load(pos_ptr + token)
    d = tl.arange(0, HALFP)
    if group < KG:
        slot = tl.load(slot_ptr + token)
        kh = group * KB + tl.arange(0, KB)
        k_mask = (kh < KH)[:, None] & (d < HALF)[None, :]
        k_off = kh[:, None] * HD + d[None, :]
        k_row = k_ptr + token * k_stride
        v_row = v_ptr + token * v_stride
        ka = tl.load(k_row + k_off, mask=k_mask)
        kb = tl.load(k_row + HALF + k_off, mask=k_mask)
        va = tl.load(v_row + k_off, mask=k_mask)
        vb = tl.load(v_row + HALF + k_off, mask=k_mask)
        ka32 = ka.to(tl.float32)
        kb32 = kb.to(tl.float32)
        if BIASED:
            k_bias = bias_ptr + QH * HD
            v_bias = bias_ptr + (QH + KH) * HD
            ka32 += tl.load(k_bias + k_off, mask=k_mask).to(tl.float32)
            kb32 += tl.load(k_bias + HALF + k_off, mask=k_mask).to(tl.float32)
            va32 = va.to(tl.float32) + tl.load(v_bias + k_off, mask=k_mask).to(tl.float32)
            vb32 = vb.to(tl.float32) + tl.load(v_bias + HALF + k_off, mask=k_mask).to(tl.float32)
            va = va32.to(v_cache_ptr.dtype.element_ty)
            vb = vb32.to(v_cache_ptr.dtype.element_ty)
        k_cs_off = tl.broadcast_to(d[None, :], (KB, HALFP))
        k_cs = cs_ptr + pos * HD
        k_cos = tl.load(k_cs + k_cs_off, mask=k_mask).to(tl.float32)
        k_sin = tl.load(k_cs + HALF + k_cs_off, mask=k_mask).to(tl.float32)

        there = k_mask & (slot >= 0)
        safe = tl.maximum(slot, 0)
        block = safe // BS
        inside = safe - block * BS
        # int64, since a cache may hold more than 2^31 elements
        head = kh.to(tl.int64)[:, None]
        k_dst = k_cache_ptr + block * k_block_stride + inside * k_place_stride
        v_dst = v_cache_ptr + block * v_block_stride + inside * v_place_stride
        k_to = head * k_head_stride + d[None, :]
        v_to = head * v_head_stride + d[None, :]
        tl.store(v_dst + v_to, va, mask=there)
        tl.store(v_dst + HALF + v_to, vb, mask=there)
        k_first = ka32 * k_cos - kb32 * k_sin
        k_second = kb32 * k_cos + ka32 * k_sin
        tl.store(k_dst + k_to, k_first.to(k_cache_ptr.dtype.element_ty), mask=there)
        tl.store(k_dst + HALF + k_to, k_second.to(k_cache_ptr.dtype.element_ty), mask=there)
    else:
        qh = (group - KG) * QB + tl.arange(0, QB)
        q_mask = (qh < QH)[:, None] & (d < HALF)[None, :]
        q_off = qh[:, None] * HD + d[None, :]
        q_row = q_ptr + token * q_stride
        qa = tl.load(q_row + q_off, mask=q_mask).to(tl.float32)
        qb = tl.load(q_row + HALF + q_off, mask=q_mask).to(tl.float32)
        if BIASED:
            qa += tl.load(bias_ptr + q_off, mask=q_mask).to(tl.float32)
            qb += tl.load(bias_ptr + HALF + q_off, mask=q_mask).to(tl.float32)
        q_cs_off = tl.broadcast_to(d[None, :], (QB, HALFP))
        q_cs = cs_ptr + pos * HD
        q_cos = tl.load(q_cs + q_cs_off, mask=q_mask).to(tl.float32)
        q_sin = tl.load(q_cs + HALF + q_cs_off, mask=q_mask).to(tl.float32)
        q_first = qa * q_cos - qb * q_sin
        q_second = qb * q_cos + qa * q_sin
        tl.store(q_row + q_off, q_first.to(q_ptr.dtype.element_ty), mask=q_mask)
        tl.store(q_row + HALF + q_off, q_second.to(q_ptr.dtype.element_ty), mask=q_mask)


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


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
    tokens = query.shape[0]
    _, block_size, kv_heads, head_dim = key_cache.shape
    q_heads = query.shape[1] // head_dim
    half = head_dim // 2
    half_p = _pow2(half)
    biased = bias.numel() > 0

    # pairs of a program, and its warps
    if tokens <= 16:
        pairs, warps = 256, 2
    elif tokens <= 64:
        pairs, warps = 512, 4
    else:
        pairs, warps = 1024, 4
    q_block = min(max(pairs // half_p, 1), _pow2(q_heads))
    k_block = min(max(pairs // half_p, 1), _pow2(kv_heads))
    while warps > 1 and q_block * half_p < 32 * warps:
        warps //= 2
    q_groups = -(-q_heads // q_block)
    k_groups = -(-kv_heads // k_block)

    rope_kv_update_kernel[(tokens, k_groups + q_groups)](
        positions,
        query,
        key,
        value,
        bias if biased else query,
        cos_sin,
        slots,
        key_cache,
        value_cache,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        QH=q_heads,
        KH=kv_heads,
        HD=head_dim,
        HALF=half,
        HALFP=half_p,
        BS=block_size,
        QB=q_block,
        KB=k_block,
        KG=k_groups,
        BIASED=biased,
        num_warps=warps,
    )
