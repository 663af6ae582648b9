# Op: silu_and_mul: output = gate / (1 + exp(-gate)) * up; arithmetic in float32.
# Arguments: gate[T: tokens, intermediate], up[T: tokens, intermediate], output[T: tokens,
#   intermediate]; T: bfloat16 or float16 or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size, any strides.
# Idea: none beyond PyTorch's: silu and a product in float32. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 9b25f6fbc8256d5aa9ab052b8741fd01d2d554c3aac8eca8fc8962387942ac8d

import torch


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(torch.nn.functional.silu(gate.float()) * up.float())
