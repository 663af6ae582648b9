"""sample_argmax in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The indices as float64.

    Args:
        logits: [tokens, vocab], any float dtype.
        output: [tokens], only written.
    """
    wide = logits.double()
    top = wide.amax(1, keepdim=True)  # NaN if a row has one
    best = (wide == top) | (wide.isnan() & top.isnan())
    places = torch.arange(wide.shape[1], device=wide.device).expand_as(wide)
    return {"output": places.masked_fill(~best, wide.shape[1]).amin(1).double()}


def control(logits: Tensor, output: Tensor) -> dict[str, Tensor]:
    """`reference` of logits in the range of float4, which ends at 6, so that many are equal; a
    judge that accepts it does not discriminate.

    A 16-bit or 8-bit dtype would not do: in many rows, none rounds to the largest logit but itself.
    """
    return {"output": reference(logits.clamp(-6.0, 6.0), output)["output"].to(output.dtype)}
