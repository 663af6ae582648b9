"""Baselines: the sampler of vLLM, torch.compile, and torch.argmax.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns (output,)
without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor], Any]


def _eager(logits: Tensor, output: Tensor) -> tuple[Tensor]:
    # of equal logits, torch.argmax gives the first
    return (torch.argmax(logits, -1),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0: on a GPU it converts the logits and takes torch.argmax."""
    if device != "cuda":
        raise ImportError("vLLM's sampler is asked on a CUDA device alone")
    from vllm.v1.sample.sampler import Sampler

    def run(logits: Tensor, output: Tensor) -> tuple[Tensor]:
        found: Tensor = Sampler.greedy_sample(logits.to(torch.float32))
        return (found,)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
