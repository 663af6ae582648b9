"""Baselines: cuBLASLt as engines call it, and torch.compile.

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


def _eager(x: Tensor, weight: Tensor, bias: Tensor, output: Tensor) -> tuple[Tensor]:
    # vLLM 0.25.1: default_unquantized_gemm of model_executor/layers/utils.py
    return (torch.nn.functional.linear(x, weight, bias if bias.numel() else None),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


BASELINES: dict[str, Callable[[str], Baseline]] = {"eager": eager, "torch.compile": compiled}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
