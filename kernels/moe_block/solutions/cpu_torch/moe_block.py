# Op: moe_block: total = h + the weighted outputs of each token's top_k MXFP4 experts, chosen by the
#   written logits of RMSNorm(h), h = residual + input; output = RMSNorm(total); float32.
# Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
#   router_weight[T: experts, hidden], router_bias[T: biased * experts], gate_up_weights[U: experts,
#   inner / 2, hidden * 2], gate_up_scales[U: experts, (inner * 2 + 255) // 256 * 8, hidden],
#   gate_up_bias[B: experts, inner * 2], down_weights[U: experts, hidden / 4, inner * 2],
#   down_scales[U: experts, (hidden + 255) // 256 * 8, inner], down_bias[B: experts, hidden],
#   next_weight[W: hidden], logits[T: tokens, experts], chosen[I: tokens, top_k], total[T: tokens,
#   hidden], output[T: tokens, hidden], alpha, limit, epsilon; T: bfloat16 or float32; W: T or
#   float32; U: uint8; B: float32; I: int32
# Writes: logits, chosen, total, output
# Needs: PyTorch alone; shipped for the CPU; one host read of the experts that are chosen.
# Idea: one matmul for the logits, a stable sort of their bits, then expert by expert of those that
#   are chosen: the layout is unfolded axis by axis, and a token's sum stays in float32. It is here
#   to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: c7c773ad6abcff886517fe0adb96c464f43256ddb45a6240542be468baa70fa7

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


def normed(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()


def moe_block(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor,
    gate_up_weights: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down_weights: torch.Tensor,
    down_scales: torch.Tensor,
    down_bias: torch.Tensor,
    next_weight: torch.Tensor,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    total: torch.Tensor,
    output: torch.Tensor,
    alpha: float,
    limit: float,
    epsilon: float,
) -> None:
    stream = residual.float() + input.float()
    x = normed(stream, weight, epsilon)
    sums = x @ router_weight.float().T
    logits.copy_(sums + router_bias.float() if router_bias.numel() else sums)
    # by bits, not by value: 0 and -0 differ, and NaN has a place
    bits = logits.float().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    found = torch.sort(order, dim=1, descending=True, stable=True).indices[:, : chosen.shape[1]]
    found = found.sort(1).values
    chosen.copy_(found)
    gates = torch.softmax(logits.gather(1, found).float(), 1)
    for expert in found.unique().tolist():
        token, choice = (found == expert).nonzero(as_tuple=True)
        bias = gate_up_bias[expert]
        wide = numbers(gate_up_weights[expert], gate_up_scales[expert], len(bias))
        sums = torch.addmm(bias, x[token], wide.T)
        gate = sums[:, 0::2].clamp(max=limit)
        up = sums[:, 1::2].clamp(min=-limit, max=limit)
        active = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
        bias = down_bias[expert]
        wide = numbers(down_weights[expert], down_scales[expert], len(bias))
        sums = torch.addmm(bias, active, wide.T)
        stream[token] += gates[token, choice].unsqueeze(1) * sums
    total.copy_(stream)
    output.copy_(normed(stream, next_weight, epsilon))
