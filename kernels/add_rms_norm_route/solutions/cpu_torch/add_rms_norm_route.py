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
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: one matmul in float32, then stable sorts by the bits of the written logits, counts and
#   cumulative sums. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 3cb1af2f7f97b11dbe56a8354bc8357b6f7438b21ec4ee93a43bb54e995a4c9a

import torch


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
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight.float())
    sums = input.float() @ router_weight.float().T
    logits.copy_(sums + router_bias.float() if router_bias.numel() else sums)
    experts, top_k = logits.shape[1], gather_index.shape[0] // len(logits)
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
