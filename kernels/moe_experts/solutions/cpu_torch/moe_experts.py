# Op: moe_experts: output[t] = sum over j of gains[t, j] * Down[e] (silu(g) * u), with e = ids[t,
#   j], and g and u the halves of GateUp[e] x[t]; float32 sums.
# Arguments: x[T: tokens, hidden], gate_up[T: experts, 2 * inner, hidden], down[T: experts, hidden,
#   inner], gains[S: tokens, top_k], ids[I: tokens, top_k], output[T: tokens, hidden]; T: bfloat16
#   or float16 or float32; S: float32 or T; I: int64 or int32
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: an expert at a time: its weights in float32, two matmuls for its tokens. It is here to be
#   right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 2724b038b21eee34d2194731c42edf689c1fb308d08ab7119208de3009c9524b

import torch


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gains: torch.Tensor,
    ids: torch.Tensor,
    output: torch.Tensor,
) -> None:
    total = torch.zeros(x.shape)
    for expert in ids[(ids >= 0) & (ids < len(down))].unique().tolist():
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].float() @ gate_up[expert].float().T).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up * gains[rows, choice].float().unsqueeze(1)
        total.index_add_(0, rows, inner @ down[expert].float().T)
    output.copy_(total)
