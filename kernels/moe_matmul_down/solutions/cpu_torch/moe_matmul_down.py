# Op: moe_matmul_down: output[row] = gate_scales[row] * (bias[e] + W[e] x[row]) for the expert e of
#   each row, W in MXFP4 as Hopper's layout has it; float32 sums, rounded once.
# Arguments: x[T: tokens * top_k, inner], weights[U: experts, hidden / 4, inner * 2], scales[U:
#   experts, (hidden + 255) // 256 * 8, inner], bias[B: experts, hidden], gate_scales[T: tokens *
#   top_k], row_map[I: tokens, top_k], histogram[I: experts], token_offsets[I: experts + 1],
#   tile_map[I: min(tokens * top_k, experts - 1 + (tokens * top_k - experts + 16) // 16)], output[T:
#   tokens * top_k, hidden]; T: bfloat16 or float32; U: uint8; B: float32; I: int32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; one host read of token_offsets.
# Idea: expert by expert, only those that have rows: the layout is unfolded axis by axis, then one
#   float32 matmul. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 421ed2eb9bcab0e56365fbe03e35d2dd426584080f5dc53f4788d63ccdd9626c

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


def moe_matmul_down(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    gate_scales: torch.Tensor,
    row_map: torch.Tensor,
    histogram: torch.Tensor,
    token_offsets: torch.Tensor,
    tile_map: torch.Tensor,
    output: torch.Tensor,
) -> None:
    offsets = token_offsets.tolist()
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin == end:
            continue
        weight = numbers(weights[expert], scales[expert], bias.shape[1])
        total = torch.addmm(bias[expert], x[begin:end].float(), weight.T)
        output[begin:end] = total * gate_scales[begin:end].float().unsqueeze(1)
