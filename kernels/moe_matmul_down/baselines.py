"""Baselines: the kernel that vLLM ships, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns
(output,). torch.compile is missing: it has no grouped matmul of packed weights.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FIRST = runpy.run_path(str(Path(__file__).parent.parent / "moe_matmul_swiglu" / "baselines.py"))
Baseline = Callable[..., Any]


def _eager(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    bias: Tensor,
    gate_scales: Tensor,
    row_map: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_map: Tensor,
    output: Tensor,
) -> tuple[Tensor]:
    # every expert computes every row, since the host does not know the number of rows per expert
    rows, total = x.float(), torch.zeros(output.shape, device=x.device)
    place = torch.arange(len(x), device=x.device)
    chosen = torch.searchsorted(token_offsets.long(), place, right=True) - 1
    for expert in range(len(weights)):
        wide = _FIRST["dequantised"](weights[expert], scales[expert], bias.shape[1])
        mine = torch.addmm(bias[expert], rows, wide.T)
        total = torch.where((chosen == expert).unsqueeze(1), mine, total)
    return ((total * gate_scales.float().unsqueeze(1)).to(output.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def vllm(device: str) -> Baseline:
    engine = _FIRST["engine"](device)

    def run(
        x: Tensor,
        weights: Tensor,
        scales: Tensor,
        bias: Tensor,
        gate_scales: Tensor,
        row_map: Tensor,
        histogram: Tensor,
        token_offsets: Tensor,
        tile_map: Tensor,
        output: Tensor,
    ) -> None:
        # without scatter_indx the same kernel runs, but not the sum after it
        tables = histogram, token_offsets, tile_map
        engine(x, weights, scales, bias, tables, row_map.shape[1], output, gammas=gate_scales)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {"vllm": vllm, "eager": eager}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
