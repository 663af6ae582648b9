# Op: rms_norm: output = input / sqrt(mean(input^2) + epsilon) * weight for each row; arithmetic in
#   float32.
# Arguments: input[T: tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T:
#   bfloat16 or float16 or float32; W: T or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: a mean of squares and two products. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: ff07e7a8a746df50e8a22132b29664c7d118b68fe1dfea007a81d0199787ab09

import torch


def rms_norm(
    input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
) -> None:
    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    output.copy_(wide * scale * weight.float())
