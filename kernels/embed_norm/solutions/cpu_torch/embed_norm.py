# Op: embed_norm: residual = table[ids]; output = residual / sqrt(mean(residual^2) + epsilon) *
#   weight for each row; arithmetic in float32.
# Arguments: ids[I: tokens], table[T: vocab, hidden], weight[W: hidden], residual[T: tokens,
#   hidden], output[T: tokens, hidden], epsilon; T: bfloat16 or float16 or float32; W: T or float32;
#   I: int32 or int64
# Writes: residual, output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: a gather, a mean of squares and two products. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 50994ef6f5de9348448f6e34e541759f4d05a0fccf01fd0b0e76018a9165c7ec

import torch


def embed_norm(
    ids: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    output: torch.Tensor,
    epsilon: float,
) -> None:
    torch.index_select(table, 0, ids, out=residual)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    output.copy_(wide * scale * weight.float())
