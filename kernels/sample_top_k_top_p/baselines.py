"""Baselines: vLLM's and flashinfer's filters with vLLM's draw, torch.compile, eager.

A factory raises ImportError with the reason where the baseline does not run. A baseline returns
(output,). flashinfer's samplers, which vLLM prefers, draw noise of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _eager(logits: Tensor, k: Tensor, p: Tensor, noise: Tensor, output: Tensor) -> tuple[Tensor]:
    # as apply_top_k_top_p_pytorch; it keeps what lies above 1 - p of the mass, from below
    found, order = logits.sort(dim=1)
    least = found.gather(1, logits.shape[1] - k.long().unsqueeze(1))
    found = found.masked_fill(found < least, -torch.inf)
    gone = found.softmax(1).cumsum(1) <= 1 - p.unsqueeze(1)
    gone[:, -1] = False
    kept = torch.empty_like(found).scatter(1, order, found.masked_fill(gone, -torch.inf))
    return ((kept.softmax(1) / noise).argmax(1),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0, TopKTopPSampler.forward_native; it filters in place, so here in a copy."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.v1.sample.ops.topk_topp_sampler import (
        apply_top_k_top_p,
        sample_with_exponential_noise,
    )

    def run(logits: Tensor, k: Tensor, p: Tensor, noise: Tensor, output: Tensor) -> tuple[Tensor]:
        kept = apply_top_k_top_p(logits.clone(), k, p)
        found: Tensor = sample_with_exponential_noise(kept.softmax(-1), noise)
        return (found,)

    return run


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs

    def run(logits: Tensor, k: Tensor, p: Tensor, noise: Tensor, output: Tensor) -> tuple[Tensor]:
        kept = top_k_mask_logits(logits.contiguous(), k)
        return ((top_p_renorm_probs(kept.softmax(-1), p) / noise).argmax(1),)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick; whole numbers are compared exactly."""
