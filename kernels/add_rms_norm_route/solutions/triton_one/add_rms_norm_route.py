# Op: add_rms_norm_route: residual += input, RMSNorm into input, router logits = input times
#   router_weight plus bias, and by the written logits the routing of moe_route; float32, rounded
#   once.
# Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
#   router_weight[T: experts, hidden], router_bias[T: biased * experts], logits[T: tokens, experts],
#   gate_scales[T: tokens * top_k], gather_index[I: tokens * top_k], scatter_index[I: tokens *
#   top_k], histogram[I: experts], token_offsets[I: experts + 1], tile_offsets[I: 4, experts + 1],
#   tile_map[I: 4, min(tokens * top_k, experts - 1 + (tokens * top_k - experts + 16) // 16)],
#   epsilon; T: bfloat16 or float16 or float32; W: T or float32; I: int32
# Writes: input, residual, logits, gate_scales, gather_index, scatter_index, histogram,
#   token_offsets, tile_offsets, tile_map
# Needs: a GPU that Triton drives; tokens at most 64, experts at most 128; contiguous tensors;
#   graph-safe.
# Idea: one launch of one program in place of three: all tokens are one tile, which is normalised
#   and multiplied on the tensor cores chunk by chunk; the logits stay in registers for the routing.
#   No atomics and no scratch memory. One multiprocessor moves all rows, so it is meant for few
#   tokens; nothing was tuned.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: c355cc3cb4d61993c77e1debf40f1770346149787c860dc6facc4e9ee12721bf

import torch
import triton
import triton.language as tl


@triton.jit
def add_rms_norm_route_kernel(
    input_ptr, residual_ptr, weight_ptr, router_ptr, bias_ptr, logits_ptr, scales_ptr, gather_ptr,
    scatter_ptr, histogram_ptr, token_offsets_ptr, tile_offsets_ptr, tile_map_ptr,
    tokens, hidden, experts, tiles, epsilon,
    BIASED: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    real_row, real = row < tokens, column < experts
    kind = input_ptr.dtype.element_ty
    squares = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, hidden, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        at = row[:, None] * hidden + k[None, :]
        inside = real_row[:, None] & (k < hidden)[None, :]
        total = tl.load(input_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(total * total, 1)
    scale = 1.0 / tl.sqrt(squares / hidden + epsilon)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, hidden, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        at = row[:, None] * hidden + k[None, :]
        deep = k < hidden
        inside = real_row[:, None] & deep[None, :]
        total = tl.load(input_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(weight_ptr + k, mask=deep, other=0.0).to(tl.float32)
        normed = (total * scale[:, None] * gain[None, :]).to(kind)
        tl.store(residual_ptr + at, total.to(kind), mask=inside)
        tl.store(input_ptr + at, normed, mask=inside)
        router_at = router_ptr + column[None, :] * hidden + k[:, None]
        router = tl.load(router_at, mask=real[None, :] & deep[:, None], other=0.0)
        sums = tl.dot(normed, router, sums, input_precision="ieee")
    if BIASED:
        sums += tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)[None, :]
    inside = real_row[:, None] & real[None, :]
    logits = sums.to(kind)
    tl.store(logits_ptr + row[:, None] * experts + column[None, :], logits, mask=inside)

    # routing, by the logits as they were written; below it is moe_route in one tile
    x = logits.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    # ascending as whole numbers where the floats ascend; the smaller expert first among equals
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    order = order * COLUMNS + (COLUMNS - 1 - column)[None, :]
    lowest = -(1 << 62)
    order = tl.where(real[None, :], order, lowest)
    chosen = tl.zeros((ROWS, COLUMNS), tl.int32)
    for _ in tl.static_range(TOP_K):
        hit = order == tl.max(order, 1)[:, None]
        chosen = tl.where(hit, 1, chosen)
        order = tl.where(hit, lowest, order)
    chosen = tl.where(inside, chosen, 0)
    counts = tl.sum(chosen, 0)
    starts = tl.cumsum(counts, 0) - counts
    tl.store(histogram_ptr + column, counts, mask=real)
    tl.store(token_offsets_ptr + column, starts, mask=real)
    tl.store(token_offsets_ptr + experts, tl.sum(counts, 0))
    for index in tl.static_range(4):
        block_log2 = 4 + index
        needed = (counts + (1 << block_log2) - 1) >> block_log2
        first = tl.cumsum(needed, 0) - needed
        last = tl.sum(needed, 0)
        offsets = tile_offsets_ptr + index * (experts + 1)
        tl.store(offsets + column, first, mask=real)
        tl.store(offsets + experts, last)
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
    mine = chosen == 1
    x = tl.where(mine, x, float("-inf"))
    # rows past the last have no choice: anything finite will do
    weight = tl.where(mine, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
    gate = row[:, None] * TOP_K + tl.cumsum(chosen, 1) - 1
    place = starts[None, :] + tl.cumsum(chosen, 0) - 1
    share = (weight / tl.sum(weight, 1)[:, None]).to(kind)
    tl.store(scales_ptr + place, share, mask=mine)
    tl.store(gather_ptr + place, gate, mask=mine)
    tl.store(scatter_ptr + gate, place, mask=mine)


def add_rms_norm_route(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor,
    logits: torch.Tensor,
    gate_scales: torch.Tensor,
    gather_index: torch.Tensor,
    scatter_index: torch.Tensor,
    histogram: torch.Tensor,
    token_offsets: torch.Tensor,
    tile_offsets: torch.Tensor,
    tile_map: torch.Tensor,
    epsilon: float,
) -> None:
    tokens, hidden = input.shape
    experts, tiles = len(router_weight), tile_map.shape[1]
    columns = max(16, triton.next_power_of_2(experts))
    add_rms_norm_route_kernel[(1,)](
        input, residual, weight, router_weight, router_bias, logits, gate_scales, gather_index,
        scatter_index, histogram, token_offsets, tile_offsets, tile_map,
        tokens, hidden, experts, tiles, epsilon,
        BIASED=router_bias.numel() > 0, TOP_K=gather_index.shape[0] // tokens,
        ROWS=max(16, triton.next_power_of_2(tokens)), COLUMNS=columns,
        DEPTH=64 if tokens > 16 else 128,
        TILES=min(triton.next_power_of_2(tiles), max(2048 // columns, 1)),
        num_warps=8,
    )  # fmt: skip
