"""What to beat: cuBLASLt as engines call it, and what torch.compile makes of it.

A factory takes the kind of device and gives a callable; it raises ImportError saying why it does
not run here. A baseline writes in place, or returns (output,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _eager(x: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> tuple[Tensor]:
    # vLLM 0.25.1: default_unquantized_gemm of model_executor/layers/utils.py
    return (torch.nn.functional.linear(x, weight, bias),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


BASELINES: dict[str, Callable[[str], Baseline]] = {"eager": eager, "torch.compile": compiled}
ACCURACY_BASELINE = "eager"
"""Whose error against float64 a candidate's error is measured by."""
