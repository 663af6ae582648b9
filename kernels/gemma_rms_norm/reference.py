"""gemma_rms_norm in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(input: Tensor, weight: Tensor, output: Tensor, epsilon: float) -> dict[str, Tensor]:
    """float64 values of what the contract says is written.

    Args:
        input: [tokens, hidden], any float dtype.
        weight: [hidden], any float dtype; what is multiplied by is one more.
        output: [tokens, hidden], not read.
        epsilon: added to the mean square.
    """
    wide = input.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return {"output": wide * scale * (1.0 + weight.double())}


def control(input: Tensor, weight: Tensor, output: Tensor, epsilon: float) -> dict[str, Tensor]:
    """`reference` with every intermediate in bfloat16; a judge that accepts it does not
    discriminate.
    """
    narrow = input.to(torch.bfloat16)
    scale = torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + epsilon)
    return {"output": (narrow * scale * (1.0 + weight.to(torch.bfloat16))).to(output.dtype)}
