# Op: gemma_rms_norm: output = input / sqrt(mean(input^2) + epsilon) * (1 + weight) for each row;
#   arithmetic in float32.
# Arguments: input[T: tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T:
#   bfloat16 or float16 or float32; W: T or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: a mean of squares and two products. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 4c726b48a165494d81a95fd71a0967dcf342f714f802c2eec97fd7ff07218bfa

import torch


def gemma_rms_norm(
    input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
) -> None:
    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    output.copy_(wide * scale * (1.0 + weight.float()))
