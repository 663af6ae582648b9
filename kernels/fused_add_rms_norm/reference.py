"""fused_add_rms_norm in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> dict[str, Tensor]:
    """float64 values of what the contract says is written.

    Args:
        input, residual: [tokens, hidden], any float dtype.
        weight: [hidden], any float dtype.
        epsilon: added to the mean square.
    """
    total = residual.double() + input.double()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return {"input": total * scale * weight.double(), "residual": total}


def control(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> dict[str, Tensor]:
    """`reference` with every intermediate in bfloat16; a judge that accepts it does not
    discriminate.
    """
    narrow = torch.bfloat16
    total = residual.to(narrow) + input.to(narrow)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = total * scale * weight.to(narrow)
    return {"input": normed.to(input.dtype), "residual": total.to(residual.dtype)}
