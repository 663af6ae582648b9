"""moe_route(logits[T: tokens, experts], gate_scales[T: gates], gather_index[I: gates],
scatter_index[I: gates], histogram[I: experts], token_offsets[I: experts + 1],
tile_offsets[I: 4, experts + 1], tile_map[I: 4, tiles]); gates = tokens * top_k."""

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
