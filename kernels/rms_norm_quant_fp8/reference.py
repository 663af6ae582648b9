"""rms_norm_quant_fp8 in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""
LEAST = 1 / (LARGEST * 512)
"""Of a scale (vLLM's min_scaling_factor)."""


def reference(
    input: Tensor, weight: Tensor, output: Tensor, scales: Tensor, epsilon: float
) -> dict[str, Tensor]:
    """The float64 values that `output` and `scales` stand for together: the normalised rows
    themselves, so that numbers on both sides of a tie err alike.

    Args:
        input: [tokens, groups * group], any float dtype.
        weight: [groups * group], any float dtype.
        output: [tokens, groups * group] in fp8, only written.
        scales: [tokens, groups], only written.
        epsilon: added to the mean square.
    """
    return {"output": _normed(input.double(), weight.double(), epsilon)}


def control(
    input: Tensor, weight: Tensor, output: Tensor, scales: Tensor, epsilon: float
) -> dict[str, Tensor]:
    """The same in float32 with a bit of the mantissa of the numbers fewer."""
    parts = _normed(input.float(), weight.float(), epsilon).unflatten(1, (scales.shape[1], -1))
    factors = (parts.abs().amax(-1) / LARGEST).clamp_min(LEAST)
    numbers = (parts / factors.unsqueeze(-1)).flatten(1)
    coarse = numbers.view(torch.int32).add(1 << 20).bitwise_and(-(1 << 21)).view(torch.float32)
    return {"output": coarse.clamp(-LARGEST, LARGEST).to(output.dtype), "scales": factors}


def _normed(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + epsilon) * weight
