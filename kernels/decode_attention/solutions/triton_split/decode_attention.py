# Op: decode_attention: attention of one new token of each request over its paged KV cache, with
#   optional window and sinks; float32, weights rounded to T.
# Arguments: query[T: tokens, group * kv_heads * head_dim], key_cache[T: blocks, block_size,
#   kv_heads, head_dim], value_cache[T: blocks, block_size, kv_heads, head_dim], block_table[I:
#   tokens, pages], lengths[I: tokens], window[I: windowed], sinks[T: sinked * group * kv_heads],
#   out[T: tokens, group * kv_heads * head_dim], scale; T: bfloat16 or float16 or float32; I: int32
# Writes: out
# Needs: a GPU that Triton drives; any stride of rows; caches of any strides with dense heads;
#   graph-safe; calls of one shape on one stream at a time.
# Idea: flash decoding in one launch instead of three. A program has whole tiles of 64 positions of
#   one request and all query heads of one key head, padded to 16 rows for tensor cores. Windows are
#   cut before the work is split, so that short ones need no second pass. Where several programs
#   share a request, the last one to end adds up their parts, found by a counter that it sets back
#   to zero.
# Made by: hand; flash decoding by Dao, Haziza, Massa and Sizov (2023).
# Figures: not measured.
# Digest: 0deeeadde15f04e0a35a303378c55f1f64c53b2fd1d43c485c8df1ebd8b00845

import torch
import triton
import triton.language as tl

_WORKSPACES: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    window_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    done_ptr,
    scale,
    q_stride,
    k_block_stride,
    k_place_stride,
    k_head_stride,
    v_block_stride,
    v_place_stride,
    v_head_stride,
    table_stride,
    out_stride,
    KH: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kh = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + token)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - tl.load(window_ptr), 0)
    # whole tiles for each program, and no program for what another has
    tiles = tl.cdiv(length - first, N)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    active = tl.maximum(tl.cdiv(tiles, each), 1)
    g = tl.arange(0, M)
    d = tl.arange(0, D)
    q_mask = (g < GROUP)[:, None] & (d < HD)[None, :]
    head = kh * GROUP + g
    q_at = head[:, None] * HD + d[None, :]
    if split < active:
        q = tl.load(q_ptr + token * q_stride + q_at, mask=q_mask, other=0.0)
        begin = first + split * each * N
        end = tl.minimum(begin + each * N, length)
        most = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        for start in range(begin, end, N):
            place = start + tl.arange(0, N)
            there = place < end
            block = tl.load(table_ptr + token * table_stride + place // BS, mask=there, other=0)
            block = block.to(tl.int64)
            inside = place % BS
            mask = there[:, None] & (d < HD)[None, :]
            k_at = block * k_block_stride + inside * k_place_stride + kh * k_head_stride
            v_at = block * v_block_stride + inside * v_place_stride + kh * v_head_stride
            k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=mask, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            s = tl.where(there[None, :], s, float("-inf"))
            above = tl.maximum(most, tl.max(s, 1))
            # where all scores are -inf, so is their largest, and the difference would be NaN
            safe = tl.where(above == float("-inf"), 0.0, above)
            p = tl.exp(s - safe[:, None])
            fade = tl.exp(most - safe)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
            most = above
        if active == 1:
            if SINKED:
                sink = tl.load(sinks_ptr + head, mask=g < GROUP, other=0.0).to(tl.float32)
                above = tl.maximum(most, sink)
                safe = tl.where(above == float("-inf"), 0.0, above)
                fade = tl.exp(most - safe)
                total = total * fade + tl.exp(sink - safe)
                acc = acc * fade[:, None]
            found = acc / total[:, None]
            found = tl.where(length > 0, found, 0.0)
            to = out_ptr + token * out_stride + q_at
            tl.store(to, found.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            # [tokens, KH, SPLITS, M, D + 2]: sums of values, then largest score and sum of weights
            row = ((token * KH + kh) * SPLITS + split) * M + g
            at = parts_ptr + row * (D + 2)
            tl.store(at[:, None] + d[None, :], acc)
            tl.store(at + D, most)
            tl.store(at + D + 1, total)
            tl.debug_barrier()
            counter = done_ptr + token * KH + kh
            before = tl.atomic_add(counter, 1, sem="acq_rel")
            if before == active - 1:
                tl.store(counter, 0)
                tl.debug_barrier()
                most = tl.full((M,), float("-inf"), tl.float32)
                total = tl.zeros((M,), tl.float32)
                acc = tl.zeros((M, D), tl.float32)
                if SINKED:
                    sink = tl.load(sinks_ptr + head, mask=g < GROUP, other=0.0).to(tl.float32)
                    most = sink
                    total = tl.exp(sink - tl.where(sink == float("-inf"), 0.0, sink))
                for part in range(active):
                    row = ((token * KH + kh) * SPLITS + part) * M + g
                    at = parts_ptr + row * (D + 2)
                    theirs = tl.load(at + D, cache_modifier=".cg")
                    above = tl.maximum(most, theirs)
                    safe = tl.where(above == float("-inf"), 0.0, above)
                    fade = tl.exp(most - safe)
                    rise = tl.exp(theirs - safe)
                    total = total * fade + tl.load(at + D + 1, cache_modifier=".cg") * rise
                    values = tl.load(at[:, None] + d[None, :], cache_modifier=".cg")
                    acc = acc * fade[:, None] + values * rise[:, None]
                    most = above
                found = acc / total[:, None]
                to = out_ptr + token * out_stride + q_at
                tl.store(to, found.to(out_ptr.dtype.element_ty), mask=q_mask)


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    tokens, pages = block_table.shape
    _, block_size, kv_heads, head_dim = key_cache.shape
    group = query.shape[1] // (kv_heads * head_dim)
    m, d, n = max(_pow2(group), 16), max(_pow2(head_dim), 16), 64
    # enough programs for two on each of some 132 multiprocessors; each reads at least a tile
    splits = min(max(264 // (tokens * kv_heads), 1), -(-pages * block_size // n), 32)
    shape = (query.device, tokens, kv_heads, splits, m, d)
    if query.is_cuda:
        shape += (torch.cuda.current_stream(query.device).cuda_stream,)
    if shape not in _WORKSPACES:
        # counters are zero before and after each call, so that one memory serves all calls
        parts = query.new_empty((tokens, kv_heads, splits, m, d + 2), dtype=torch.float32)
        counters = query.new_zeros((tokens, kv_heads), dtype=torch.int32)
        _WORKSPACES[shape] = parts, counters
    parts, counters = _WORKSPACES[shape]
    decode_attention_kernel[(tokens, kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_table,
        lengths,
        window if window.numel() else lengths,
        sinks if sinks.numel() else query,
        out,
        parts,
        counters,
        scale,
        query.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        out.stride(0),
        KH=kv_heads,
        GROUP=group,
        HD=head_dim,
        BS=block_size,
        SPLITS=splits,
        WINDOWED=window.numel() > 0,
        SINKED=sinks.numel() > 0,
        M=m,
        D=d,
        N=n,
        num_warps=4,
        num_stages=2,
    )
