"""linear_fp8 in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS = 16
"""The number of parts into which the control splits each sum."""


def reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """The float64 value of `output`, whose previous contents do not matter.

    Args:
        x: [tokens, blocks * block] in fp8.
        x_scale: [tokens, blocks], one for each `block` numbers of a row.
        weight: [outer, blocks * block] in fp8.
        weight_scale: [outer / block, rounded up, blocks].
        output: [tokens, outer], only written.
    """
    left, right = dequantised(x, x_scale, weight, weight_scale, torch.float64)
    return {"output": left @ right.T}


def control(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """`reference` with a running sum in bfloat16."""
    left, right = dequantised(x, x_scale, weight, weight_scale, torch.float32)
    total = torch.zeros(output.shape, dtype=torch.bfloat16, device=output.device)
    for ours, theirs in zip(left.chunk(_PARTS, 1), right.chunk(_PARTS, 1), strict=True):
        total = (total.float() + ours @ theirs.T).bfloat16()
    return {"output": total.to(output.dtype)}


def dequantised(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The numbers of x and of the weight."""
    block = x.shape[1] // x_scale.shape[1]
    spread = weight_scale.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)
    left = x.to(dtype) * x_scale.to(dtype).repeat_interleave(block, 1)
    return left, weight.to(dtype) * spread.to(dtype)
