"""Baselines: chains of a matmul that writes the logits and an argmax that reads them.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns (output,)
without a copy.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
_LINEAR, _ARGMAX = (
    runpy.run_path(str(_OPS / name / "baselines.py"))["BASELINES"]
    for name in ("linear", "sample_argmax")
)

Baseline = Callable[[Tensor, Tensor, Tensor], Any]


def _chain(linear: Callable[..., Any], argmax: Callable[..., Any]) -> Baseline:
    """Matmul and argmax in turn; each writes in place, or returns what it wrote."""

    def run(x: Tensor, weight: Tensor, output: Tensor) -> tuple[Tensor]:
        logits = x.new_empty(len(x), len(weight))
        [found] = linear(x, weight, x.new_empty(0), logits) or (logits,)
        [chosen] = argmax(found, output) or (output,)
        return (chosen,)

    return run


def _eager(x: Tensor, weight: Tensor, output: Tensor) -> tuple[Tensor]:
    # here, not the parts' own: torch.compile cannot find the module of a file that runpy ran
    return (torch.argmax(torch.nn.functional.linear(x, weight), -1),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0: cuBLASLt, the logits in float32, torch.argmax."""
    return _chain(_LINEAR["eager"](device), _ARGMAX["vllm"](device))


def patched(device: str) -> Baseline:
    """The chain of our own kernels for the two ops, those in Triton."""
    if device != "cuda":
        raise ImportError("our kernels in Triton need a CUDA device")
    solutions = ("linear", "triton_tile"), ("sample_argmax", "triton_row")
    return _chain(
        *(
            runpy.run_path(str(_OPS / name / "solutions" / solution / f"{name}.py"))[name]
            for name, solution in solutions
        )
    )


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "patched": patched,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick; an index is judged by what may be chosen, whatever this baseline chooses."""
