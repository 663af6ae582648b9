# Op: mla_decode: latent attention of one new token of each request over its paged cache, whose rows
#   are keys and, but for the rotated part, values; float32, weights rounded to T.
# Arguments: query[T: tokens, heads, latent + rope], cache[T: blocks, block_size, latent + rope],
#   block_table[I: tokens, pages], lengths[I: tokens], out[T: tokens, heads, latent], scale; T:
#   bfloat16 or float16 or float32; I: int32
# Writes: out
# Needs: a GPU that Triton drives, with 75 KB of shared memory for latent 512; any strides with
#   dense rows; graph-safe; calls of one shape on one stream at a time.
# Idea: flash decoding. A program has 16 heads of one request and a part of its positions, and reads
#   a row once as key and value. A second launch adds the parts up; a batch that fills the GPU has
#   one part, and no second launch.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 33ff89589f9ca881940a9c7da96e3d9a56742fba9a86c3028f1b0db2b55c19d2

import torch
import triton
import triton.language as tl

_PARTS: dict[tuple, torch.Tensor] = {}


@triton.jit
def mla_decode_part_kernel(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, out_ptr, parts_ptr, scale, heads, each,
    q_pitch, q_head_pitch, block_pitch, place_pitch, table_pitch, out_pitch, SPLITS: tl.constexpr,
    BS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * M + tl.arange(0, M)
    d, r = tl.arange(0, D), tl.arange(0, R)
    there = (head < heads)[:, None]
    q_at = q_ptr + token * q_pitch + head[:, None] * q_head_pitch
    q = tl.load(q_at + d[None, :], mask=there & (d < LATENT)[None, :], other=0.0)
    q_rope = tl.load(q_at + LATENT + r[None, :], mask=there & (r < ROPE)[None, :], other=0.0)
    length = tl.load(lengths_ptr + token)
    begin = split * each
    end = tl.minimum(begin + each, length)
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(begin, end, N):
        place = start + tl.arange(0, N)
        real = place < end
        block = tl.load(table_ptr + token * table_pitch + place // BS, mask=real, other=0)
        at = cache_ptr + block.to(tl.int64) * block_pitch + place % BS * place_pitch
        row = tl.load(
            at[:, None] + d[None, :], mask=real[:, None] & (d < LATENT)[None, :], other=0.0
        )
        rope = tl.load(
            at[:, None] + LATENT + r[None, :], mask=real[:, None] & (r < ROPE)[None, :], other=0.0
        )
        s = tl.dot(q, tl.trans(row), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(rope), s, input_precision="ieee") * scale
        s = tl.where(real[None, :], s, float("-inf"))
        above = tl.maximum(most, tl.max(s, 1))
        # where all scores are -inf, so is their largest, and the difference would be NaN
        safe = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp(s - safe[:, None])
        fade = tl.exp(most - safe)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(row.dtype), row, acc * fade[:, None], input_precision="ieee")
        most = above
    mask = there & (d < LATENT)[None, :]
    if SPLITS == 1:
        found = tl.where(length > 0, acc / total[:, None], 0.0)
        at = out_ptr + token * out_pitch + head[:, None] * LATENT + d[None, :]
        tl.store(at, found.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # [tokens, heads, SPLITS, LATENT + 2]: sums of rows, largest score, sum of weights
        at = parts_ptr + ((token * heads + head) * SPLITS + split) * (LATENT + 2)
        tl.store(at[:, None] + d[None, :], acc, mask=mask)
        tl.store(at + LATENT, most, mask=head < heads)
        tl.store(at + LATENT + 1, total, mask=head < heads)


@triton.jit
def mla_decode_kernel(
    parts_ptr, lengths_ptr, out_ptr, heads, out_pitch,
    SPLITS: tl.constexpr, LATENT: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, d = tl.arange(0, S), tl.arange(0, D)
    at = parts_ptr + ((token * heads + head) * SPLITS + split) * (LATENT + 2)
    real = split < SPLITS
    most = tl.load(at + LATENT, mask=real, other=float("-inf"))
    total = tl.load(at + LATENT + 1, mask=real, other=0.0)
    rows = tl.load(at[:, None] + d[None, :], mask=real[:, None] & (d < LATENT)[None, :], other=0.0)
    top = tl.max(most, 0)
    rise = tl.exp(most - tl.where(top == float("-inf"), 0.0, top))
    found = tl.sum(rows * rise[:, None], 0) / tl.sum(total * rise, 0)
    found = tl.where(tl.load(lengths_ptr + token) > 0, found, 0.0)
    to = out_ptr + token * out_pitch + head * LATENT + d
    tl.store(to, found.to(out_ptr.dtype.element_ty), mask=d < LATENT)


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    (tokens, heads, latent), pages = out.shape, block_table.shape[1]
    rope, block_size = query.shape[2] - latent, cache.shape[1]
    tile = 16 if query.dtype is torch.float32 else 32
    groups, tiles = triton.cdiv(heads, 16), triton.cdiv(pages * block_size, tile)
    # two programs for each of about 132 multiprocessors, of two tiles at least
    wanted = max(min(264 // (tokens * groups), tiles // 2, 32), 1)
    each = triton.cdiv(tiles, wanted) * tile
    splits = triton.cdiv(pages * block_size, each)
    parts = out
    if splits > 1:
        key = (out.device, tokens, heads, splits, latent)
        if out.is_cuda:
            key += (torch.cuda.current_stream(out.device).cuda_stream,)
        if key not in _PARTS:
            shape = (tokens, heads, splits, latent + 2)
            _PARTS[key] = out.new_empty(shape, dtype=torch.float32)
        parts = _PARTS[key]
    wide = max(triton.next_power_of_2(latent), 16)
    mla_decode_part_kernel[(tokens, groups, splits)](
        query, cache, block_table, lengths, out, parts, scale, heads, each,
        *query.stride()[:2], *cache.stride()[:2], block_table.stride(0), out.stride(0),
        SPLITS=splits, BS=block_size, LATENT=latent, ROPE=rope, M=16, N=tile, D=wide,
        R=max(triton.next_power_of_2(rope), 16), num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        mla_decode_kernel[(tokens, heads)](
            parts, lengths, out, heads, out.stride(0), SPLITS=splits, LATENT=latent,
            S=triton.next_power_of_2(splits), D=wide, num_warps=4,
        )  # fmt: skip
