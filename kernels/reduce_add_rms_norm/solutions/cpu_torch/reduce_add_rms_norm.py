# Op: reduce_add_rms_norm: residual[t] += sum over k of rows[row_map[t, k]] (-1: skipped); output[t]
#   = residual[t] / sqrt(mean(residual[t]^2) + epsilon) * weight; float32, nothing rounded in
#   between.
# Arguments: rows[T: tokens * top_k + spare, hidden], row_map[I: tokens, top_k], residual[T: tokens,
#   hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T: bfloat16 or float16 or
#   float32; W: T or float32; I: int32
# Writes: residual, output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: one gather and one add over all tokens for each choice, then the norm, in float32; a row
#   that is skipped is masked, as it may hold NaN.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 608f658c8f2d9b9c9c72dde9efa870390924be9b8e47b83552a928ad4c65bb9c

import torch


def reduce_add_rms_norm(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    epsilon: float,
) -> None:
    total = residual.float()
    for k in range(row_map.shape[1]):
        chosen = row_map[:, k]
        term = rows[chosen.clamp(min=0)].float()
        # not a product with zero: a row that is skipped may hold NaN
        total = total + term.masked_fill((chosen < 0).unsqueeze(1), 0.0)
    residual.copy_(total)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    output.copy_(total * scale * weight.float())
