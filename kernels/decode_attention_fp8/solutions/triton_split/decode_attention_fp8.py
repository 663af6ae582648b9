# Op: decode_attention_fp8: attention of one new token of each request over its paged KV cache in
#   fp8, with optional window and sinks; float32, weights rounded to T.
# Arguments: query[Q: tokens, group * kv_heads * head_dim], key_cache[C: blocks, block_size,
#   kv_heads, head_dim], value_cache[C: blocks, block_size, kv_heads, head_dim], q_scale[F: scaled],
#   k_scale[F: 1], v_scale[F: 1], block_table[I: tokens, pages], lengths[I: tokens], window[I:
#   windowed], sinks[T: sinked * group * kv_heads], out[T: tokens, group * kv_heads * head_dim],
#   scale; T: bfloat16 or float16 or float32; Q: T or float8_e4m3fn; C: float8_e4m3fn; F: float32;
#   I: int32
# Writes: out
# Needs: a GPU of capability 8.9 or above that Triton drives, 9.0 for float32; any stride of rows;
#   caches of any strides with dense heads; graph-safe; calls of one shape on one stream at a time.
# Idea: that of decode_attention's triton_split: one launch, of which a program has whole tiles of
#   positions of one request and all query heads of one key head, and the last one of a request adds
#   up. A cache's numbers become T in registers, which has them all, so that no weight is rounded to
#   fp8; scales multiply scores and sums, not numbers. Nothing was tuned for fp8.
# Made by: hand; flash decoding by Dao, Haziza, Massa and Sizov (2023).
# Figures: not measured.
# Digest: bc1e4b1d5c71a1af03f9099e499a4a7ed24ac1d627af73429f41d59b3a1005e3

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# rows at most, whether windowed: positions of a tile, programs of a row, warps, stages of loads;
# those of decode_attention, which were the fastest for a cache in bfloat16 on an H100
_PLANS = (
    (16, False, (128, 32, 2, 1)),
    (16, True, (128, 4, 8, 1)),
    (256, False, (64, 6, 2, 2)),
    (256, True, (128, 4, 8, 1)),
    (1 << 62, False, (128, 1, 4, 2)),
    (1 << 62, True, (64, 1, 2, 2)),
)

_WORKSPACES: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}


@triton.jit
def decode_attention_fp8_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    SCALED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKED: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # the next kernel may load its blocks and its own weights meanwhile; it waits, too
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    kh = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + token)
    factor = tl.load(k_scale_ptr) * scale
    if SCALED:
        factor *= tl.load(q_scale_ptr)
    v_scale = tl.load(v_scale_ptr)
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
        # numbers of fp8 are numbers of T, too: products are exact, and no weight is rounded to fp8
        kind = out_ptr.dtype.element_ty
        q = tl.load(q_ptr + token * q_stride + q_at, mask=q_mask, other=0.0).to(kind)
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
            k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=mask, other=0.0).to(kind)
            v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=mask, other=0.0).to(kind)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
            s = tl.where(there[None, :], s, float("-inf"))
            above = tl.maximum(most, tl.max(s, 1))
            # where all scores are -inf, so is their largest, and the difference would be NaN
            safe = tl.where(above == float("-inf"), 0.0, above)
            p = tl.exp(s - safe[:, None])
            fade = tl.exp(most - safe)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            acc += tl.dot(p.to(kind), v, input_precision="ieee")
            most = above
        if active == 1:
            if SINKED:
                sink = tl.load(sinks_ptr + head, mask=g < GROUP, other=0.0).to(tl.float32)
                above = tl.maximum(most, sink)
                safe = tl.where(above == float("-inf"), 0.0, above)
                fade = tl.exp(most - safe)
                total = total * fade + tl.exp(sink - safe)
                acc = acc * fade[:, None]
            found = acc * v_scale / total[:, None]
            found = tl.where(length > 0, found, 0.0)
            to = out_ptr + token * out_stride + q_at
            tl.store(to, found.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            # [tokens, KH, SPLITS, G, D + 2]: sums of values, then largest score and sum of weights
            row = ((token * KH + kh) * SPLITS + split) * G + g
            at = parts_ptr + row * (D + 2)
            tl.store(at[:, None] + d[None, :], acc, mask=(g < G)[:, None])
            tl.store(at + D, most, mask=g < G)
            tl.store(at + D + 1, total, mask=g < G)
            tl.debug_barrier()
            counter = done_ptr + token * KH + kh
            before = tl.atomic_add(counter, 1, sem="acq_rel")
            if before == active - 1:
                tl.store(counter, 0)
                tl.debug_barrier()
                h = tl.arange(0, G)
                heads = kh * GROUP + h
                high = tl.full((G,), float("-inf"), tl.float32)
                mass = tl.zeros((G,), tl.float32)
                mixed = tl.zeros((G, D), tl.float32)
                if SINKED:
                    sink = tl.load(sinks_ptr + heads, mask=h < GROUP, other=0.0).to(tl.float32)
                    high = sink
                    mass = tl.exp(sink - tl.where(sink == float("-inf"), 0.0, sink))
                for start in range(0, active, C):
                    part = start + tl.arange(0, C)
                    part_row = ((token * KH + kh) * SPLITS + part)[:, None] * G + h[None, :]
                    part_at = parts_ptr + part_row * (D + 2)
                    is_part = (part < active)[:, None] & (h < G)[None, :]
                    theirs = tl.load(
                        part_at + D, mask=is_part, other=float("-inf"), cache_modifier=".cg"
                    )
                    weights = tl.load(
                        part_at + D + 1, mask=is_part, other=0.0, cache_modifier=".cg"
                    )
                    values = tl.load(
                        part_at[:, :, None] + d[None, None, :],
                        mask=is_part[:, :, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    above = tl.maximum(high, tl.max(theirs, 0))
                    safe = tl.where(above == float("-inf"), 0.0, above)
                    fade = tl.exp(high - safe)
                    rise = tl.exp(theirs - safe[None, :])
                    mass = mass * fade + tl.sum(weights * rise, 0)
                    mixed = mixed * fade[:, None] + tl.sum(values * rise[:, :, None], 0)
                    high = above
                result = mixed * v_scale / mass[:, None]
                to = out_ptr + token * out_stride + heads[:, None] * HD + d[None, :]
                there = (h < GROUP)[:, None] & (d < HD)[None, :]
                tl.store(to, result.to(out_ptr.dtype.element_ty), mask=there)


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _plan(rows: int, positions: int, windowed: bool) -> tuple[int, int, int, int]:
    """Positions of a tile, programs of a row at most, warps, and stages of loads.

    Args:
        rows: key heads of all tokens.
        positions: the most that a token attends to.
        windowed: whether a token attends to few of them.
    """
    n, splits, warps, stages = next(
        plan for most, short, plan in _PLANS if windowed == short and rows <= most
    )
    return n, min(splits, -(-positions // n)), warps, stages


@cache
def _launches_dependently(device: torch.device) -> bool:
    """Whether kernels of this device may begin before the one before has ended (Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def decode_attention_fp8(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
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
    m, g, d = max(_pow2(group), 16), _pow2(group), max(_pow2(head_dim), 16)
    n, splits, warps, stages = _plan(tokens * kv_heads, pages * block_size, window.numel() > 0)
    shape = (query.device, tokens, kv_heads, splits, g, d)
    if query.is_cuda:
        shape += (torch.cuda.current_stream(query.device).cuda_stream,)
    if shape not in _WORKSPACES:
        # counters are zero before and after each call, so that one memory serves all calls
        parts = out.new_empty((tokens, kv_heads, splits, g, d + 2), dtype=torch.float32)
        counters = out.new_zeros((tokens, kv_heads), dtype=torch.int32)
        _WORKSPACES[shape] = parts, counters
    parts, counters = _WORKSPACES[shape]
    pdl = _launches_dependently(query.device)
    decode_attention_fp8_kernel[(tokens, kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        q_scale if q_scale.numel() else k_scale,
        k_scale,
        v_scale,
        block_table,
        lengths,
        window if window.numel() else lengths,
        sinks if sinks.numel() else out,
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
        SCALED=q_scale.numel() > 0,
        WINDOWED=window.numel() > 0,
        SINKED=sinks.numel() > 0,
        M=m,
        G=g,
        D=d,
        N=n,
        C=4,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        **({"launch_pdl": True} if pdl else {}),
    )
