# Op: lm_head_argmax: the index of each token's largest logit, x times weight in float32, without
#   writing the logits; of equal ones the smallest index, and NaN is above infinity.
# Arguments: x[T: tokens, hidden], weight[T: vocab, hidden], output[I: tokens]; T: bfloat16 or
#   float16 or float32; I: int64
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: one matmul in float32, and torch.argmax, which takes the first of
#   equal logits. It does write the logits. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: e37cc49e2b3293f8e967291e47f4efd8b6c88172aa76da0d571d28922ea79ca3

import torch


def lm_head_argmax(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
    torch.argmax(x.float() @ weight.float().T, 1, out=output)
