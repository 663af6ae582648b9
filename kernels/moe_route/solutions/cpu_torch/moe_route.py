# Op: moe_route: each token's top_k experts (equal logits: the smaller first), their softmax, the
#   gates sorted by expert, counts, offsets, and tile maps of blocks of 16, 32, 64 and 128 rows.
# Arguments: logits[T: tokens, experts], gate_scales[T: tokens * top_k], gather_index[I: tokens *
#   top_k], scatter_index[I: tokens * top_k], histogram[I: experts], token_offsets[I: experts + 1],
#   tile_offsets[I: 4, experts + 1], tile_map[I: 4, min(tokens * top_k, experts - 1 + (tokens *
#   top_k - experts + 16) // 16)]; T: bfloat16 or float16 or float32; I: int32
# Writes: gate_scales, gather_index, scatter_index, histogram, token_offsets, tile_offsets, tile_map
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: stable sorts by the bits of the logits, so that ties and NaN have one order, then counts and
#   cumulative sums for each block size. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 13cb96a8f8369ac9af61890bd18db478de358db66713a69b23d9792dacb7b1e1

import torch


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
    top_k = gather_index.shape[0] // tokens
    # by bits, not by value: 0 and -0 differ, and NaN has a place
    bits = logits.float().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    chosen = torch.sort(order, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = chosen.sort(1).values
    scales = torch.softmax(logits.gather(1, chosen).float(), 1)
    flat = chosen.flatten()
    gather = torch.argsort(flat, stable=True)
    gather_index.copy_(gather)
    scatter_index[gather] = torch.arange(len(gather), dtype=torch.int32, device=flat.device)
    gate_scales.copy_(scales.flatten()[gather])
    counts = torch.bincount(flat, minlength=experts)
    histogram.copy_(counts)
    token_offsets[0] = 0
    token_offsets[1:] = counts.cumsum(0)
    tile_offsets[:, 0] = 0
    tile_map.fill_(-1)
    for index, block in enumerate((16, 32, 64, 128)):
        tiles = (counts + block - 1) // block
        tile_offsets[index, 1:] = tiles.cumsum(0)
        expert = torch.repeat_interleave(torch.arange(experts, device=flat.device), tiles)
        first = tile_offsets[index, expert]
        place = torch.arange(len(expert), device=flat.device)
        tile_map[index, : len(expert)] = ((place - first) * 65536 + expert).int()
