"""relu_squared in plain PyTorch: the float64 reference, and a control that must be rejected."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """float64 values of what is written; x, out: [n]."""
    return {"out": x.double().clamp(min=0) ** 2}


def control(x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """The same in bfloat16: less precision than the contract wants."""
    return {"out": (x.to(torch.bfloat16).clamp(min=0) ** 2).to(out.dtype)}
