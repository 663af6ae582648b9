"""Baselines: vLLM's two kernels, with its norm or flashinfer's, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place, or returns
(residual, output) as an engine's functional code does.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
_SUM = runpy.run_path(str(_OPS / "moe_reduce" / "baselines.py"))
_NORM = runpy.run_path(str(_OPS / "fused_add_rms_norm" / "baselines.py"))

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Any]


def _eager(
    rows: Tensor,
    row_map: Tensor,
    residual: Tensor,
    weight: Tensor,
    output: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    flat = row_map.view(-1)
    chosen = rows[flat.clamp(min=0).long()].float().masked_fill((flat < 0).unsqueeze(1), 0.0)
    total = residual.float() + chosen.view(*row_map.shape, -1).sum(1)
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
    return total.to(residual.dtype), normed.to(output.dtype)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def _two_kernels(norm: str) -> Callable[[str], Baseline]:
    def factory(device: str) -> Baseline:
        summed, normed = _SUM["vllm"](device), _NORM[norm](device)

        def run(
            rows: Tensor,
            row_map: Tensor,
            residual: Tensor,
            weight: Tensor,
            output: Tensor,
            epsilon: float,
        ) -> None:
            summed(rows.unsqueeze(0), row_map, rows.new_empty((0, row_map.shape[1])), output)
            normed(output, residual, weight, epsilon)

        return run

    return factory


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": _two_kernels("vllm"),
    "vllm+flashinfer": _two_kernels("flashinfer"),
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
