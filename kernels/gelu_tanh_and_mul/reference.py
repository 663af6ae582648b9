"""gelu_tanh_and_mul in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(gate: Tensor, up: Tensor, output: Tensor) -> dict[str, Tensor]:
    """float64 values of what the contract says is written.

    Args:
        gate: [tokens, intermediate], any float dtype.
        up: [tokens, intermediate], any float dtype.
        output: [tokens, intermediate], not read.
    """
    return {"output": _gelu(gate.double()) * up.double()}


def control(gate: Tensor, up: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` of a gate in float8; a judge that accepts it does not discriminate.

    bfloat16 would not do: without a sum it errs by little more than a bfloat16 output is rounded.
    """
    narrow = gate.to(torch.float8_e4m3fn).float()
    return {"output": (_gelu(narrow) * up.float()).to(output.dtype)}


def _gelu(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 is sigmoid(2 u), which keeps its digits where tanh(u) is near -1
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x.pow(3)))
