"""matmul_nvfp4 in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16


def reference(x: Tensor, weights: Tensor, scales: Tensor, out: Tensor) -> dict[str, Tensor]:
    """float64 values of `out`.

    Args:
        x: [rows, depth]; out: [rows, columns].
        weights: [columns, depth / 2], two numbers a byte, the first in the lower half.
        scales: [columns, depth / 16].
    """
    return {"out": x.double() @ dequantised(weights, scales).double().T}


def control(x: Tensor, weights: Tensor, scales: Tensor, out: Tensor) -> dict[str, Tensor]:
    """The same with numbers and sums in bfloat16."""
    wide = dequantised(weights, scales).bfloat16()
    return {"out": (x.bfloat16() @ wide.T).to(out.dtype)}


def dequantised(weights: Tensor, scales: Tensor) -> Tensor:
    """Float32 [columns, depth]."""
    codes = weights.view(torch.uint8)
    table = torch.tensor([*FP4, *(-each for each in FP4)], device=codes.device)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return table[both.long()] * scales.float().repeat_interleave(BLOCK, -1)
