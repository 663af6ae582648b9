"""Baselines: vLLM's kernels for block scales, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns (output,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _eager(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, output: Tensor
) -> tuple[Tensor]:
    block = x.shape[1] // x_scale.shape[1]
    left = x.float() * x_scale.repeat_interleave(block, 1)
    scale = weight_scale.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)
    return ((left @ (weight.float() * scale).T).to(output.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm_triton(device: str) -> Baseline:
    """vLLM 0.33.0's kernel where CUTLASS and DeepGEMM have none."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    def run(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, output: Tensor
    ) -> tuple[Tensor]:
        block = x.shape[1] // x_scale.shape[1]
        sizes = [block, block]
        found: Tensor = w8a8_triton_block_scaled_mm(
            x, weight, x_scale, weight_scale, sizes, output.dtype
        )
        return (found,)

    return run


def vllm_cutlass(device: str) -> Baseline:
    """What vLLM 0.33.0 runs on Hopper: it wants the scales of x column by column."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops as ops

    def run(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, output: Tensor
    ) -> tuple[Tensor]:
        if output.dtype is torch.float32 or x.shape[1] // x_scale.shape[1] != 128:
            raise ImportError("vLLM's kernel gives 16 bits, with blocks of 128")
        columns = x_scale.T.contiguous().T
        found: Tensor = ops.cutlass_scaled_mm(x, weight.T, columns, weight_scale.T, output.dtype)
        return (found,)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm-cutlass": vllm_cutlass,
    "vllm-triton": vllm_triton,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
