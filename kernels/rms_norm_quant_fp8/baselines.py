"""Baselines: vLLM's kernels, in one and in two, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place, or returns
(output, scales).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, float], Any]


def _eager(
    input: Tensor, weight: Tensor, output: Tensor, scales: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    wide = input.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    # rounded before and after the weight, as vLLM's kernels do and LlamaRMSNorm.forward
    wide = (wide.to(input.dtype) * weight).to(input.dtype).float()
    groups = wide.unflatten(1, (scales.shape[1], -1))
    factors = (groups.abs().amax(-1) / 448.0).clamp_min(1 / (448.0 * 512.0))
    numbers = (groups / factors.unsqueeze(-1)).clamp(-448.0, 448.0)
    return numbers.flatten(1).to(output.dtype), factors


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def _same_dtype(input: Tensor, weight: Tensor) -> None:
    if weight.dtype != input.dtype:
        raise ImportError("vLLM's kernel wants the weight in the dtype of the input")


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0's fused kernels, as its pass rms_quant_fusion.py puts them into a graph: a scale
    per token where a row is one group.
    """
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops  # noqa: F401  # it registers torch.ops._C

    def run(input: Tensor, weight: Tensor, output: Tensor, scales: Tensor, epsilon: float) -> None:
        _same_dtype(input, weight)
        groups = scales.shape[1]
        if groups == 1:
            torch.ops._C.rms_norm_dynamic_per_token_quant(
                output, input, weight, scales, epsilon, None, None
            )
            return
        group = input.shape[1] // groups
        if group not in (64, 128):
            raise ImportError("vLLM's kernel has groups of 64 or 128")
        torch.ops._C.rms_norm_per_block_quant(
            output, input, weight, scales, epsilon, None, None, group, False
        )

    return run


def vllm_apart(device: str) -> Baseline:
    """vLLM 0.33.0's norm, rounded to the input's dtype, and then its quantisation."""
    if device != "cuda":
        raise ImportError("vLLM's kernels need a CUDA device")
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def run(
        input: Tensor, weight: Tensor, output: Tensor, scales: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        _same_dtype(input, weight)
        normed = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        ops.rms_norm(normed, input, weight, epsilon)
        found: tuple[Tensor, Tensor]
        if scales.shape[1] == 1:
            found = ops.scaled_fp8_quant(normed, output=output, use_per_token_if_dynamic=True)
        else:
            group = input.shape[1] // scales.shape[1]
            found = per_token_group_quant_fp8(normed, group, out_q=output, use_ue8m0=False)
        return found

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "vllm-apart": vllm_apart,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
