"""Baselines: the kernel that vLLM ships, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns
(output,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _eager(rows: Tensor, row_map: Tensor, scales: Tensor, output: Tensor) -> tuple[Tensor]:
    # like the end of grouped experts in transformers' integrations/moe.py: gather, weigh, sum
    tokens, top_k = row_map.shape
    flat = row_map.view(-1)
    chosen = rows[:, flat.clamp(min=0).long()].float().sum(0)
    chosen = chosen.masked_fill((flat < 0).unsqueeze(1), 0.0).view(tokens, top_k, -1)
    if scales.shape[0]:
        # a skipped choice adds nothing, whatever its weight
        chosen = chosen * scales.float().masked_fill(row_map < 0, 0.0).unsqueeze(-1)
    return (chosen.sum(1).to(output.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.utils.import_utils import has_triton_kernels

    if not has_triton_kernels():  # this also aliases vLLM's copy as triton_kernels
        raise ImportError("this vLLM has no triton_kernels")
    from triton_kernels.matmul_ogs import Epilogue, FusedActivation, reduce_grouped

    # as matmul_ogs passes both for a matmul without activation (vLLM 0.25.1)
    plain = (FusedActivation(), Epilogue())

    def run(rows: Tensor, row_map: Tensor, scales: Tensor, output: Tensor) -> None:
        if scales.shape[0]:
            raise ImportError("vLLM's kernel takes no scales: its matmul applied them")
        reduce_grouped(
            rows.unsqueeze(1), row_map, output.unsqueeze(0), None, *plain, out_dtype=output.dtype
        )

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
