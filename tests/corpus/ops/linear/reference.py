"""linear in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, out: Tensor) -> dict[str, Tensor]:
    """float64 values of `out`; what the buffer held before does not matter.

    Args:
        x: [tokens, k].
        weight: [n, k].
        out: [tokens, n], only written.
    """
    return {"out": x.double() @ weight.double().t()}


def control(x: Tensor, weight: Tensor, out: Tensor) -> dict[str, Tensor]:
    """The same from operands rounded to bfloat16."""
    narrow = torch.bfloat16
    return {"out": (x.to(narrow).float() @ weight.to(narrow).float().t()).to(out.dtype)}
