"""scaled_add in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, y: Tensor, out: Tensor, scale: float) -> dict[str, Tensor]:
    """float64 values of `out`; x, y, out: [n]."""
    return {"out": x.double() + scale * y.double()}


def control(x: Tensor, y: Tensor, out: Tensor, scale: float) -> dict[str, Tensor]:
    """The same from operands rounded to bfloat16."""
    narrow = torch.bfloat16
    return {"out": (x.to(narrow).float() + scale * y.to(narrow).float()).to(out.dtype)}
