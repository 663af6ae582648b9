# Op: moe_reduce: output[t] = sum over k of scales[t, k] * sum over s of rows[s, row_map[t, k]],
#   entries of -1 skipped, scales 1 where there are none; float32, rounded once.
# Arguments: rows[X: splits, tokens * top_k + spare, hidden], row_map[I: tokens, top_k], scales[S:
#   scaled * tokens, top_k], output[T: tokens, hidden]; T: bfloat16 or float16 or float32; X: T or
#   float32; S: float32 or T; I: int32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: one gather and one multiply-add over all tokens for each choice, in float32; a row that is
#   skipped is masked, not multiplied by 0, as it may hold NaN.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: bf878249e3a074328714c7a804da0cfbcba67f31367bfc21a0f31c44cbf19121

import torch


def moe_reduce(
    rows: torch.Tensor, row_map: torch.Tensor, scales: torch.Tensor, output: torch.Tensor
) -> None:
    total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
    for k in range(row_map.shape[1]):
        chosen = row_map[:, k]
        term = rows[:, chosen.clamp(min=0)].float().sum(0)
        if scales.shape[0]:
            term = term * scales[:, k : k + 1].float()
        # not a product with zero: a row that is skipped may hold NaN
        total += term.masked_fill((chosen < 0).unsqueeze(1), 0.0)
    output.copy_(total)
