# Op: linear_fp8: output[t, n] = sum over k of x[t, k] * x_scale[t, k // block] * weight[n, k] *
#   weight_scale[n // block, k // block]; sums in float32, rounded once.
# Arguments: x[Q: tokens, blocks * block], x_scale[F: tokens, blocks], weight[Q: outer, blocks *
#   block], weight_scale[F: (outer + block - 1) // block, blocks], output[T: tokens, outer]; Q:
#   float8_e4m3fn; F: float32; T: bfloat16 or float16 or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: numbers times scales in float32, and one matmul. It is here to be
#   right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 733a85d8121bef05287a0991530b35c487b6154d3362e2e97f97cd2695217ea0

import torch


def linear_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
) -> None:
    block = x.shape[1] // x_scale.shape[1]
    left = x.float() * x_scale.repeat_interleave(block, 1)
    scale = weight_scale.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)
    output.copy_(left @ (weight.float() * scale).T)
