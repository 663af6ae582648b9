"""What to beat: eager."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

_dequantised = runpy.run_path(str(Path(__file__).with_name("reference.py")))["dequantised"]
Baseline = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor]]


def _eager(x: Tensor, weights: Tensor, scales: Tensor, out: Tensor) -> tuple[Tensor]:
    return (x @ _dequantised(weights, scales).T,)


def eager(device: str) -> Baseline:
    return _eager


BASELINES: dict[str, Callable[[str], Baseline]] = {"eager": eager}
ACCURACY_BASELINE = "eager"
