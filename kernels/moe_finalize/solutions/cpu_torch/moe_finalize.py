# Op: moe_finalize: output[t] = sum over k of scales[t, k] * (rows[row_map[k, t]] + bias[experts[t,
#   k]]), no bias where that has 0 rows; float32, rounded once.
# Arguments: rows[T: tokens * top_k, hidden], row_map[I: top_k, tokens], scales[S: tokens, top_k],
#   bias[T: biased * experts, hidden], experts[I: tokens, top_k], output[T: tokens, hidden]; T:
#   bfloat16 or float16 or float32; S: float32; I: int32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: one gather and one multiply-add over all tokens for each choice, in float32. It is here to
#   be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 41b35ae2ba03754310c9e981ef76160b1f7c300600113e31edcf29deeb164146

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
