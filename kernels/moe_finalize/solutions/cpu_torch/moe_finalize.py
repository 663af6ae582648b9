"""moe_finalize(rows[T: tokens * top_k, hidden], row_map[I: top_k, tokens],
scales[S: tokens, top_k], bias[T: experts or 0, hidden], experts[I: tokens, top_k],
output[T: tokens, hidden])."""

import torch


def moe_finalize(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    experts: torch.Tensor,
    output: torch.Tensor,
) -> None:
    total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
    for k, chosen in enumerate(row_map):
        term = rows.index_select(0, chosen).float()
        if bias.shape[0]:
            term += bias.index_select(0, experts[:, k]).float()
        total.addcmul_(term, scales[:, k : k + 1].float())
    output.copy_(total)
