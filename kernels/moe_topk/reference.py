"""moe_topk in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, scores: Tensor, experts: Tensor) -> dict[str, Tensor]:
    """The values of `scores` and `experts`, both as float64.

    Args:
        logits: [tokens, n_experts], any float dtype.
        scores, experts: [tokens, top_k], only written.
    """
    found = _chosen(logits, scores.shape[1], torch.float64)
    return {name: value.double() for name, value in found.items()}


def control(logits: Tensor, scores: Tensor, experts: Tensor) -> dict[str, Tensor]:
    """`reference` with the softmax in bfloat16, like a kernel with bfloat16 arithmetic."""
    found = _chosen(logits, scores.shape[1], torch.bfloat16)
    return {"scores": found["scores"].to(scores.dtype), "experts": found["experts"]}


def _chosen(logits: Tensor, top_k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    chosen = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :top_k]
    # step by step, so that each intermediate is rounded to dtype
    picked = logits.gather(1, chosen).to(dtype)
    weights = (picked - picked.amax(1, keepdim=True)).exp()
    total = torch.zeros_like(weights[:, :1])
    for k in range(top_k):
        total = total + weights[:, k : k + 1]
    return {"scores": weights / total, "experts": chosen}
