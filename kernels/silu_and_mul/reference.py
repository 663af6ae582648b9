"""silu_and_mul in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(gate: Tensor, up: Tensor, output: Tensor) -> dict[str, Tensor]:
    """float64 values of what the contract says is written.

    Args:
        gate: [tokens, intermediate], any float dtype.
        up: [tokens, intermediate], any float dtype.
        output: [tokens, intermediate], not read.
    """
    wide = gate.double()
    # where exp(-x) overflows, x times its reciprocal is the 0 that the limit is
    return {"output": wide * torch.sigmoid(wide) * up.double()}


def control(gate: Tensor, up: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` with every number in float8; a judge that accepts it does not discriminate.

    bfloat16 would not do: without a sum it errs by little more than a bfloat16 output is rounded.
    """
    narrow = gate.to(torch.float8_e4m3fn).float()
    return {"output": (narrow * torch.sigmoid(narrow) * up.float()).to(output.dtype)}
