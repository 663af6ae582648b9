"""embed_norm in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    ids: Tensor, table: Tensor, weight: Tensor, residual: Tensor, output: Tensor, epsilon: float
) -> dict[str, Tensor]:
    """float64 values of residual and output, [tokens, hidden], of ids [tokens], table [vocab,
    hidden] and weight [hidden]; epsilon is added to the mean square.
    """
    rows = table[ids.long()].double()
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    return {"residual": rows, "output": rows * scale * weight.double()}


def control(
    ids: Tensor, table: Tensor, weight: Tensor, residual: Tensor, output: Tensor, epsilon: float
) -> dict[str, Tensor]:
    """`reference` with every intermediate of the norm in bfloat16."""
    rows = table[ids.long()]
    narrow = rows.to(torch.bfloat16)
    scale = torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + epsilon)
    found = narrow * scale * weight.to(torch.bfloat16)
    return {"residual": rows, "output": found.to(output.dtype)}
