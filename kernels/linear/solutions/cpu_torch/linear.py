# Op: linear: output[t, n] = bias[n] + sum over k of x[t, k] * weight[n, k], an empty bias adding
#   nothing; sums and products in float32, rounded once.
# Arguments: x[T: tokens, inner], weight[T: outer, inner], bias[T: biased * outer], output[T:
#   tokens, outer]; T: bfloat16 or float16 or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: one matmul in float32, copied into the output's dtype. It is here to
#   be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 7c841df7846674f3e5f76f6df50f6a62d0c35ce66c8f7fcb220dedb1da7c829b

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor) -> None:
    total = x.float() @ weight.float().T
    output.copy_(total + bias.float() if bias.numel() else total)
