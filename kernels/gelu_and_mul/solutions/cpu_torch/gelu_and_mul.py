# Op: gelu_and_mul: output = gate / 2 * (1 + erf(gate / sqrt(2))) * up; arithmetic in float32.
# Arguments: gate[T: tokens, intermediate], up[T: tokens, intermediate], output[T: tokens,
#   intermediate]; T: bfloat16 or float16 or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size, any strides.
# Idea: none beyond PyTorch's: gelu and a product in float32. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: cc45adda7f5a0289c70a9ab3ff842b126a274a00ac59797e69982e3c7710297a

import torch


def gelu_and_mul(gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(torch.nn.functional.gelu(gate.float()) * up.float())
