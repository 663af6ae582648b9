"""What to beat: torch.compile, and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor], Any]


def _eager(x: Tensor, weight: Tensor, out: Tensor) -> tuple[Tensor]:
    return (torch.nn.functional.linear(x, weight),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


BASELINES: dict[str, Callable[[str], Baseline]] = {"torch.compile": compiled, "eager": eager}
ACCURACY_BASELINE = "eager"
"""Whose error against float64 a candidate's error is measured by."""
