"""gelu_and_mul in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(gate: Tensor, up: Tensor, output: Tensor) -> dict[str, Tensor]:
    """float64 values of `output`, [tokens, intermediate] as gate and up, any float dtype."""
    return {"output": _gelu(gate.double()) * up.double()}


def control(gate: Tensor, up: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` of a gate in float8: without a sum, bfloat16 errs by little more than a bfloat16
    output is rounded.
    """
    narrow = gate.to(torch.float8_e4m3fn).float()
    return {"output": (_gelu(narrow) * up.float()).to(output.dtype)}


def _gelu(x: Tensor) -> Tensor:
    # 1 + erf(u) is erfc(-u), which keeps its digits where erf(u) is near -1
    return x / 2 * torch.erfc(-x / math.sqrt(2))
