"""Baselines: the engines' own kernels, torch.compile, and transformers' eager code.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place, or returns
(output,) as an engine's functional code does, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, float], Any]


def _eager(input: Tensor, weight: Tensor, output: Tensor, epsilon: float) -> tuple[Tensor]:
    # transformers 5.17 to 5.23: Gemma3RMSNorm.forward
    hidden = input.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    return ((hidden * (1.0 + weight.float())).type_as(input),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def torchs(device: str) -> Baseline:
    def run(input: Tensor, weight: Tensor, output: Tensor, epsilon: float) -> tuple[Tensor]:
        # the sum in float32: in bfloat16 it would lose bits of the weight
        gain = 1.0 + weight.float()
        wide = torch.nn.functional.rms_norm(input.float(), gain.shape, gain, epsilon)
        return (wide.to(input.dtype),)

    return run


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.norm import gemma_rmsnorm

    def run(input: Tensor, weight: Tensor, output: Tensor, epsilon: float) -> None:
        if weight.dtype != input.dtype:
            raise ImportError("flashinfer's kernel wants the weight in the dtype of the input")
        gemma_rmsnorm(input, weight, epsilon, out=output)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "flashinfer": flashinfer,
    "torch": torchs,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
