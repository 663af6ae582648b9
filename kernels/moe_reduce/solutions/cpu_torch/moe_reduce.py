"""moe_reduce(rows[X: splits, expert_rows, hidden], row_map[I: tokens, top_k],
scales[S: tokens or 0, top_k], output[T: tokens, hidden])."""

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
