# Op: moe_route: each token's top_k experts (equal logits: the smaller first), their softmax, the
#   gates sorted by expert, counts, offsets, and tile maps of blocks of 16, 32, 64 and 128 rows.
# Arguments: logits[T: tokens, experts], gate_scales[T: tokens * top_k], gather_index[I: tokens *
#   top_k], scatter_index[I: tokens * top_k], histogram[I: experts], token_offsets[I: experts + 1],
#   tile_offsets[I: 4, experts + 1], tile_map[I: 4, min(tokens * top_k, experts - 1 + (tokens *
#   top_k - experts + 16) // 16)]; T: bfloat16 or float16 or float32; I: int32
# Writes: gate_scales, gather_index, scatter_index, histogram, token_offsets, tile_offsets, tile_map
# Needs: a GPU that Triton drives; meant for the few tokens of a decode step; graph-safe.
# Idea: one program in place of several launches: a first pass over the tokens counts, a second
#   gives each gate its row. No atomics, so the order is the contract's.
# Made by: hand, as a plain right solution.
# Figures: not measured by itself; it ran in vLLM in place of vLLM's own:
#   bench/results/vllm-points/README.md.
# Digest: 21cd1b3596dbe5ffa78df6de4cbe03d399705c8b597e8064f5d085b06332b3f7

"""moe_route(logits[T: tokens, experts], gate_scales[T: gates], gather_index[I: gates],
scatter_index[I: gates], histogram[I: experts], token_offsets[I: experts + 1],
tile_offsets[I: 4, experts + 1], tile_map[I: 4, tiles]); gates = tokens * top_k.

One program: a first pass over the tokens counts, a second gives each gate its row. Meant for the
few tokens of a decode step; no atomics, so the order is the contract's.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def choose(logits_ptr, begin, tokens, experts, TOP_K: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """Logits of some rows, and 1 where one is among its row's largest."""
    row = begin + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < tokens) & (column[None, :] < experts)
    at = row[:, None] * experts + column[None, :]
    x = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # ascending as whole numbers where the floats ascend; the smaller expert first among equals
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    order = order * COLUMNS + (COLUMNS - 1 - column)[None, :]
    lowest = -(1 << 62)
    order = tl.where(column[None, :] < experts, order, lowest)
    chosen = tl.zeros((ROWS, COLUMNS), tl.int32)
    for _ in tl.static_range(TOP_K):
        top = tl.max(order, 1)
        hit = order == top[:, None]
        chosen = tl.where(hit, 1, chosen)
        order = tl.where(hit, lowest, order)
    return x, tl.where(inside, chosen, 0)


@triton.jit
def moe_route_kernel(
    logits_ptr, scales_ptr, gather_ptr, scatter_ptr, histogram_ptr, token_offsets_ptr,
    tile_offsets_ptr, tile_map_ptr, tokens, experts, tiles,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    real = column < experts
    counts = tl.zeros((COLUMNS,), tl.int32)
    begin = 0
    while begin < tokens:
        _, chosen = choose(logits_ptr, begin, tokens, experts, TOP_K, ROWS, COLUMNS)
        counts += tl.sum(chosen, 0)
        begin += ROWS
    starts = tl.cumsum(counts, 0) - counts
    tl.store(histogram_ptr + column, counts, mask=real)
    tl.store(token_offsets_ptr + column, starts, mask=real)
    tl.store(token_offsets_ptr + experts, tl.sum(counts, 0))

    for index in tl.static_range(4):
        block_log2 = 4 + index
        needed = (counts + (1 << block_log2) - 1) >> block_log2
        first = tl.cumsum(needed, 0) - needed
        last = tl.sum(needed, 0)
        at = tile_offsets_ptr + index * (experts + 1)
        tl.store(at + column, first, mask=real)
        tl.store(at + experts, last)
        begin = 0
        while begin < tiles:
            tile = begin + tl.arange(0, TILES)
            # the expert of a tile is the one between whose first and last tile it lies
            ours = (tile[:, None] >= first[None, :]) & (tile[:, None] < (first + needed)[None, :])
            packed = ((tile[:, None] - first[None, :]) << 16) + column[None, :]
            packed = tl.sum(tl.where(ours, packed, 0), 1)
            packed = tl.where(tile < last, packed, -1)
            tl.store(tile_map_ptr + index * tiles + tile, packed, mask=tile < tiles)
            begin += TILES

    begin = 0
    while begin < tokens:
        x, chosen = choose(logits_ptr, begin, tokens, experts, TOP_K, ROWS, COLUMNS)
        row = begin + tl.arange(0, ROWS)
        x = tl.where(chosen == 1, x, float("-inf"))
        top = tl.max(x, 1)
        # rows past the last have no choice: anything finite will do
        weight = tl.where(chosen == 1, tl.exp(x - top[:, None]), 0.0)
        total = tl.sum(weight, 1)
        gate = row[:, None] * TOP_K + tl.cumsum(chosen, 1) - 1
        place = starts[None, :] + tl.cumsum(chosen, 0) - 1
        mine = chosen == 1
        scale = (weight / total[:, None]).to(scales_ptr.dtype.element_ty)
        tl.store(scales_ptr + place, scale, mask=mine)
        tl.store(gather_ptr + place, gate, mask=mine)
        tl.store(scatter_ptr + gate, place, mask=mine)
        starts += tl.sum(chosen, 0)
        begin += ROWS


def moe_route(
    logits: torch.Tensor,
    gate_scales: torch.Tensor,
    gather_index: torch.Tensor,
    scatter_index: torch.Tensor,
    histogram: torch.Tensor,
    token_offsets: torch.Tensor,
    tile_offsets: torch.Tensor,
    tile_map: torch.Tensor,
) -> None:
    tokens, experts = logits.shape
    columns = triton.next_power_of_2(experts)
    rows = min(triton.next_power_of_2(tokens), max(2048 // columns, 1))
    moe_route_kernel[(1,)](
        logits, gate_scales, gather_index, scatter_index, histogram, token_offsets, tile_offsets,
        tile_map, tokens, experts, tile_map.shape[1],
        TOP_K=gather_index.shape[0] // tokens, ROWS=rows, COLUMNS=columns,
        TILES=min(triton.next_power_of_2(tile_map.shape[1]), max(2048 // columns, 1)),
        num_warps=4,
    )  # fmt: skip
