"""moe_finalize in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    rows: Tensor, row_map: Tensor, scales: Tensor, bias: Tensor, experts: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """The float64 value of `output`, whose previous contents do not matter.

    Args:
        rows: [tokens * top_k, hidden], any float dtype.
        row_map: [top_k, tokens], integers in [0, tokens * top_k).
        scales: [tokens, top_k], any float dtype.
        bias: [experts, hidden], any float dtype, or [0, hidden] for none.
        experts: [tokens, top_k], integers.
        output: [tokens, hidden], only written.
    """
    return {"output": _summed(rows, row_map, scales, bias, experts, torch.float64)}


def control(
    rows: Tensor, row_map: Tensor, scales: Tensor, bias: Tensor, experts: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """`reference` with every product and sum rounded to bfloat16."""
    total = _summed(rows, row_map, scales, bias, experts, torch.bfloat16)
    return {"output": total.to(output.dtype)}


def _summed(
    rows: Tensor,
    row_map: Tensor,
    scales: Tensor,
    bias: Tensor,
    experts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    total = torch.zeros(row_map.shape[1], rows.shape[1], dtype=dtype, device=rows.device)
    for k, chosen in enumerate(row_map.long()):
        term = rows[chosen].to(dtype)
        if bias.shape[0]:
            term = term + bias[experts[:, k].long()].to(dtype)
        total = total + term * scales[:, k : k + 1].to(dtype)
    return total
