"""moe_reduce in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(rows: Tensor, row_map: Tensor, scales: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The float64 value of `output`, whose previous contents do not matter.

    Args:
        rows: [splits, expert_rows, hidden], any float dtype.
        row_map: [tokens, top_k], integers; -1 is skipped.
        scales: [tokens, top_k], any float dtype, or [0, top_k] for all 1.
        output: [tokens, hidden], only written.
    """
    return {"output": _summed(rows, row_map, scales, torch.float64)}


def control(rows: Tensor, row_map: Tensor, scales: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` with every product and sum rounded to bfloat16."""
    return {"output": _summed(rows, row_map, scales, torch.bfloat16).to(output.dtype)}


def _summed(rows: Tensor, row_map: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(row_map.shape[0], rows.shape[-1], dtype=dtype, device=rows.device)
    for k in range(row_map.shape[1]):
        chosen = row_map[:, k].long()
        for partial in rows.to(dtype):
            term = partial[chosen.clamp(min=0)]
            if scales.shape[0]:
                term = term * scales[:, k : k + 1].to(dtype)
            total = total + term.masked_fill((chosen < 0).unsqueeze(1), 0.0)
    return total
