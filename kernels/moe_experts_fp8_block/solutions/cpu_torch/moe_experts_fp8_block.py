# Op: moe_experts_fp8_block: output[t] = sum over j of gains[t, j] * W2[e] (silu(g) * u), with e =
#   ids[t, j] and g, u the halves of W1[e] x[t]; weights are fp8 times their block's scale; float32.
# Arguments: x[T: tokens, depth * block], w1[Q: experts, 2 * wide * block, depth * block],
#   w1_scale[F: experts, 2 * wide, depth], w2[Q: experts, depth * block, wide * block], w2_scale[F:
#   experts, depth, wide], gains[F: tokens, top_k], ids[I: tokens, top_k], output[T: tokens, depth *
#   block]; T: bfloat16 or float16 or float32; Q: float8_e4m3fn; F: float32; I: int32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: an expert at a time: its weights in float32, two matmuls for its tokens. It is here to be
#   right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 2cec5a7339379d1b696864b256af755d143b40ac3cf8bd093505b09851644fbc

import torch


def moe_experts_fp8_block(
    x: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    gains: torch.Tensor,
    ids: torch.Tensor,
    output: torch.Tensor,
) -> None:
    block = x.shape[1] // w1_scale.shape[2]
    total = torch.zeros(x.shape)
    for expert in ids[ids >= 0].unique().tolist():
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        first, second = (
            weight[expert].float()
            * scale[expert].repeat_interleave(block, 0).repeat_interleave(block, 1)
            for weight, scale in ((w1, w1_scale), (w2, w2_scale))
        )
        gate, up = (x[rows].float() @ first.T).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up * gains[rows, choice].unsqueeze(1)
        total.index_add_(0, rows, inner @ second.T)
    output.copy_(total)
