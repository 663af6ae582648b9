"""softmax_lse in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, probs: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """float64 values of `probs` and `lse`; what the buffers held before does not matter.

    Args:
        logits: [rows, n], any float dtype.
        probs: [rows, n], only written.
        lse: [rows], only written.
    """
    wide = logits.double()
    top = wide.max(-1, keepdim=True).values
    weights = (wide - top).exp()
    total = weights.sum(-1, keepdim=True)
    return {"probs": weights / total, "lse": (top + total.log()).squeeze(-1)}


def control(logits: Tensor, probs: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The same with every intermediate in bfloat16."""
    narrow = logits.to(torch.bfloat16)
    top = narrow.max(-1, keepdim=True).values
    weights = (narrow - top).exp()
    total = weights.sum(-1, keepdim=True)
    return {
        "probs": (weights / total).to(probs.dtype),
        "lse": (top + total.log()).squeeze(-1).to(lse.dtype),
    }
