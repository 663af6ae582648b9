"""linear in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

from torch import Tensor

_PARTS = 16
"""The number of parts into which the control splits each sum."""


def reference(x: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The float64 value of `output`, whose previous contents do not matter.

    Args:
        x: [tokens, inner], any float dtype.
        weight: [outer, inner], likewise.
        bias: [outer], likewise; or [0], for none.
        output: [tokens, outer], only written.
    """
    added = bias.double() if bias.numel() else 0.0
    return {"output": x.double() @ weight.double().T + added}


def control(x: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` with a running sum in bfloat16."""
    added = bias if bias.numel() else weight.new_zeros(len(weight))
    total = added.bfloat16().expand(output.shape)
    for left, right in zip(x.chunk(_PARTS, 1), weight.chunk(_PARTS, 1), strict=True):
        total = (total.float() + left.float() @ right.float().T).bfloat16()
    return {"output": total.to(output.dtype)}
