"""Baselines: vLLM's kernel, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns (output, scales).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor], Any]


def _eager(x: Tensor, output: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(1, (scales.shape[1], -1))
    factors = groups.abs().amax(-1).clamp_min(1e-10) / 448.0
    numbers = (groups / factors.unsqueeze(-1)).clamp(-448.0, 448.0)
    return numbers.flatten(1).to(output.dtype), factors


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0's kernel."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def run(x: Tensor, output: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        group = x.shape[1] // scales.shape[1]
        found: tuple[Tensor, Tensor] = per_token_group_quant_fp8(
            x, group, out_q=output, use_ue8m0=False
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
