"""Baselines: vLLM's routers, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns (weights, experts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Any]


def _eager(
    logits: Tensor, bias: Tensor, settings: Tensor, weights: Tensor, experts: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    sigmoid, renormalised, groups, top_groups = settings.shape
    size = logits.shape[1] // groups
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(1)
    values = scores + bias if bias.numel() else scores
    members = values.unflatten(1, (groups, size))
    best = members.topk(min(2, size) if bias.numel() else 1).values.sum(2)
    # stable sorts, since torch.topk does not define the order of equal values
    kept = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :top_groups]
    out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    left = out.repeat_interleave(size, 1).gather(1, order).int()
    left = torch.sort(left, dim=1, stable=True).indices[:, : weights.shape[1]]
    chosen = order.gather(1, left)
    picked = scores.gather(1, chosen)
    if renormalised:
        picked = picked / (picked.sum(1, keepdim=True) + 1e-20)
    return picked * scaling, chosen.to(experts.dtype)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """vLLM's function of GroupedTopKRouter. With a bias it runs its fused kernel, which rounds
    scores and values to the dtype of the logits; without one, compiled PyTorch."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

    def run(
        logits: Tensor,
        bias: Tensor,
        settings: Tensor,
        weights: Tensor,
        experts: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        sigmoid, renormalised, groups, top_groups = settings.shape
        found: tuple[Tensor, Tensor] = grouped_topk(
            hidden_states=logits,  # of which it reads the number of rows alone
            gating_output=logits,
            topk=weights.shape[1],
            renormalize=bool(renormalised),
            num_expert_group=groups,
            topk_group=top_groups,
            scoring_func="sigmoid" if sigmoid else "softmax",
            routed_scaling_factor=scale,
            e_score_correction_bias=bias if bias.numel() else None,
        )
        return found

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
