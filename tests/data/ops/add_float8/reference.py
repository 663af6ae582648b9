"""add_float8 in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, y: Tensor, out: Tensor, scale: float) -> dict[str, Tensor]:
    """float64 values of `out`, at most the largest number of its dtype; x, y, out: [rows, n]."""
    largest = torch.finfo(out.dtype).max
    return {"out": (x.double() + scale * y.double()).clamp(-largest, largest)}


def control(x: Tensor, y: Tensor, out: Tensor, scale: float) -> dict[str, Tensor]:
    """The same with one bit less of mantissa."""
    exact = reference(x, y, out, scale)["out"]
    fraction, exponent = torch.frexp(exact)
    steps = 0.5 / torch.finfo(out.dtype).eps
    narrow = torch.ldexp((fraction * steps).round() / steps, exponent)
    return {"out": narrow.float().to(out.dtype)}
