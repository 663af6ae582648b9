"""reduce_add_rms_norm(rows[T: expert_rows, hidden], row_map[I: tokens, top_k],
residual[T: tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon)."""

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
