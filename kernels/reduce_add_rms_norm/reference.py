"""reduce_add_rms_norm in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    rows: Tensor,
    row_map: Tensor,
    residual: Tensor,
    weight: Tensor,
    output: Tensor,
    epsilon: float,
) -> dict[str, Tensor]:
    """The float64 values of `residual` and `output`; previous contents of `output` do not matter.

    Args:
        rows: [expert_rows, hidden], any float dtype.
        row_map: [tokens, top_k], integers; -1 is skipped.
        residual: [tokens, hidden], likewise.
        weight: [hidden], likewise.
        output: [tokens, hidden], only written.
        epsilon: added to the mean square.
    """
    return _normed(rows, row_map, residual, weight, epsilon, torch.float64)


def control(
    rows: Tensor,
    row_map: Tensor,
    residual: Tensor,
    weight: Tensor,
    output: Tensor,
    epsilon: float,
) -> dict[str, Tensor]:
    """`reference` with every sum and product in bfloat16."""
    found = _normed(rows, row_map, residual, weight, epsilon, torch.bfloat16)
    return {name: value.to(output.dtype) for name, value in found.items()}


def _normed(
    rows: Tensor,
    row_map: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    total = residual.to(dtype)
    for k in range(row_map.shape[1]):
        chosen = row_map[:, k].long()
        term = rows[chosen.clamp(min=0)].to(dtype)
        total = total + term.masked_fill((chosen < 0).unsqueeze(1), 0.0)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return {"residual": total, "output": total * scale * weight.to(dtype)}
