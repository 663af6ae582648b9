# Op: linear: output[t, n] = bias[n] + sum over k of x[t, k] * weight[n, k]; sums and products in
#   float32, rounded once.
# Arguments: x[T: tokens, inner], weight[T: outer, inner], bias[T: outer], output[T: tokens, outer];
#   T: bfloat16 or float16 or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: one addmm in float32, copied into the output's dtype. It is here to
#   be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: d01d28a92baa143c336a524e29c5dc512083d2dbbf2a06f7723e6c9eac167a68

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(torch.addmm(bias.float(), x.float(), weight.float().T))
