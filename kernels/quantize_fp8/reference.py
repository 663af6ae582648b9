"""quantize_fp8 in plain PyTorch: the float64 reference, an honest quantiser and the control."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""
LEAST = 1e-10
"""Of a group's largest absolute value."""


def reference(x: Tensor, output: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The float64 values that `output` and `scales` stand for together: x itself, so that numbers
    on both sides of a tie err alike.

    Args:
        x: [tokens, groups * group], any float dtype.
        output: [tokens, groups * group] in fp8, only written.
        scales: [tokens, groups], only written.
    """
    return {"output": x.double()}


def control(x: Tensor, output: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The same with a bit of the mantissa fewer."""
    numbers, factors = scaled(x, scales.shape[1])
    coarse = numbers.view(torch.int32).add(1 << 20).bitwise_and(-(1 << 21)).view(torch.float32)
    return {"output": coarse.clamp(-LARGEST, LARGEST).to(output.dtype), "scales": factors}


def scaled(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Numbers over their group's scale, float32 [tokens, groups * group], and the scales."""
    parts = x.float().unflatten(1, (groups, -1))
    factors = parts.abs().amax(-1).clamp_min(LEAST) / LARGEST
    numbers = (parts / factors.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return numbers.flatten(1), factors
