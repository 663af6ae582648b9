# Op: gelu_tanh_and_mul: output = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3))) *
#   up; arithmetic in float32.
# Arguments: gate[T: tokens, intermediate], up[T: tokens, intermediate], output[T: tokens,
#   intermediate]; T: bfloat16 or float16 or float32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size, any strides.
# Idea: none beyond PyTorch's: gelu and a product in float32. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 36d4045645a7392d128e0519185134d6140045874af56ff7773371ccf946fe7c

import torch


def gelu_tanh_and_mul(gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(torch.nn.functional.gelu(gate.float(), approximate="tanh") * up.float())
