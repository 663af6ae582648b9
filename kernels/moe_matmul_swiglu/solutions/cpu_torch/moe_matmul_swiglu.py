# Op: moe_matmul_swiglu: with h = bias[e] + W[e] x[token of row], W in MXFP4 as Hopper's layout has
#   it: output[row] = gate / (1 + exp(-alpha * gate)) * (up + 1), gate and up the even and odd of h,
#   clamped by limit; float32, rounded once.
# Arguments: x[T: tokens, hidden], weights[U: experts, inner / 2, hidden * 2], scales[U: experts,
#   (inner * 2 + 255) // 256 * 8, hidden], bias[B: experts, inner * 2], gather_index[I: tokens *
#   top_k], histogram[I: experts], token_offsets[I: experts + 1], tile_map[I: min(tokens * top_k,
#   experts - 1 + (tokens * top_k - experts + 16) // 16)], output[T: tokens * top_k, inner], alpha,
#   limit; T: bfloat16 or float32; U: uint8; B: float32; I: int32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; one host read of token_offsets.
# Idea: expert by expert, only those that have rows: the layout is unfolded axis by axis, one
#   float32 matmul, then the activation. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 09994f5643fbc60fe47b2bdc526849f5c2284d7ccb87ed05f205bafaa3303cb0

import torch


def numbers(weights: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """One expert's weights [columns, depth]: Hopper's layout unfolded axis by axis."""
    depth = weights.shape[1] // 2
    halves = weights.view(torch.int16).view(columns // 16, 4, depth // 64, 2, 4, 4, 2, 1).int()
    shifted = torch.cat((halves, halves << 3, halves << 6), -1)
    last = (halves << 1 & 0x8000) | (halves >> 3 & 0x0180) | (halves >> 7 & 0x0040)
    # the bits of a bfloat16 that is 2^126 times too small
    bits = torch.cat((shifted & 0x81C0, last), -1) << 16
    value = bits.view(torch.float32).double() * 2.0**126
    # n: 16s, pair, odd; k: 64s, odd pair, 16s; odd k; k's 8, n's 8
    value = value.view(columns // 16, 4, depth // 64, 2, 4, 4, 2, 2, 2)
    value = value.permute(0, 8, 1, 3, 2, 5, 7, 4, 6).reshape(columns, depth // 32, 32)
    exponent = scales.reshape(-1, 8, depth // 64, 2, 8, 2, 2).permute(0, 3, 1, 6, 4, 2, 5)
    scale = torch.exp2(exponent.reshape(-1, depth // 32)[:columns].float() - 127)
    return (value.float() * scale.unsqueeze(2)).view(columns, depth)


def moe_matmul_swiglu(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    gather_index: torch.Tensor,
    histogram: torch.Tensor,
    token_offsets: torch.Tensor,
    tile_map: torch.Tensor,
    output: torch.Tensor,
    alpha: float,
    limit: float,
) -> None:
    tokens = gather_index // (gather_index.shape[0] // x.shape[0])
    offsets = token_offsets.tolist()
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin == end:
            continue
        rows = x[tokens[begin:end]].float()
        weight = numbers(weights[expert], scales[expert], bias.shape[1])
        hidden = torch.addmm(bias[expert], rows, weight.T)
        gate = hidden[:, 0::2].clamp(max=limit)
        up = hidden[:, 1::2].clamp(min=-limit, max=limit)
        output[begin:end] = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
