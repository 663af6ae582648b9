"""Baselines: the engines' own kernels, torch.compile, and transformers' eager code.

A factory raises ImportError with the reason where the baseline does not run. A baseline writes in
place, or returns (output,) as an engine's functional code does, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor], Any]


def _eager(gate: Tensor, up: Tensor, output: Tensor) -> tuple[Tensor]:
    # transformers 5.17 to 5.23: Zamba2MLP.forward, rounded once as the contract says
    wide = torch.nn.functional.gelu(gate.float()) * up.float()
    return (wide.to(gate.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def _joined(gate: Tensor, up: Tensor) -> Tensor:
    """The tensor whose halves these are: the engines' kernels take it, and a copy costs time."""
    rows, inner = gate.shape
    begins = gate.data_ptr() + inner * gate.element_size() == up.data_ptr()
    if not begins or gate.stride() != (2 * inner, 1) or up.stride() != (2 * inner, 1):
        raise ImportError("it takes gate and up as the halves of one tensor")
    return gate.as_strided((rows, 2 * inner), (2 * inner, 1))


def vllm(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops  # noqa: F401  # it registers torch.ops._C

    def run(gate: Tensor, up: Tensor, output: Tensor) -> None:
        torch.ops._C.gelu_and_mul(output, _joined(gate, up))

    return run


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.activation import gelu_and_mul

    def run(gate: Tensor, up: Tensor, output: Tensor) -> None:
        gelu_and_mul(_joined(gate, up), out=output)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "flashinfer": flashinfer,
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick of a candidate's error."""
