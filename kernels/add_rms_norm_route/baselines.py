"""Baselines: chains of three kernels, each link that of another op's baselines or solutions.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns the written tensors in the
order of the contract, without a copy.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
Baseline = Callable[..., tuple[Tensor, ...]]


def _baselines_of(name: str) -> dict[str, Callable[[str], Callable[..., Any]]]:
    """Those of another op; torch.compile looks up the module of each function by its name."""
    place = f"{__name__}.{name}"
    spec = importlib.util.spec_from_file_location(place, _OPS / name / "baselines.py")
    module = sys.modules[place] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BASELINES


_NORM, _LINEAR, _ROUTE = map(_baselines_of, ("fused_add_rms_norm", "linear", "moe_route"))


def _chain(
    norm: Callable[..., Any], linear: Callable[..., Any], route: Callable[..., Any]
) -> Baseline:
    """Norm, router and routing in turn; each writes in place, or returns what it wrote."""

    def run(
        input: Tensor,
        residual: Tensor,
        weight: Tensor,
        router_weight: Tensor,
        router_bias: Tensor,
        logits: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        *tables, epsilon = rest
        normed, total = norm(input, residual, weight, epsilon) or (input, residual)
        [found] = linear(normed, router_weight, router_bias, logits) or (logits,)
        return normed, total, found, *(route(found, *tables) or tables)

    return run


def _by(norm: str, linear: str, route: str) -> Callable[[str], Baseline]:
    """The chain of three baselines, by their names."""

    def factory(device: str) -> Baseline:
        return _chain(_NORM[norm](device), _LINEAR[linear](device), _ROUTE[route](device))

    return factory


def compiled(device: str) -> Baseline:
    run = _chain(_NORM["eager"](device), _LINEAR["eager"](device), _ROUTE["eager"](device))
    compiled: Baseline = torch.compile(run, dynamic=True)
    return compiled


def patched(device: str) -> Baseline:
    """The chain of our own kernels for the three ops, those in Triton."""
    if device != "cuda":
        raise ImportError("our kernels in Triton need a CUDA device")
    solutions = ("fused_add_rms_norm", "triton_row"), ("linear", "triton_tile")
    return _chain(
        *(
            runpy.run_path(str(_OPS / name / "solutions" / solution / f"{name}.py"))[name]
            for name, solution in (*solutions, ("moe_route", "triton_one"))
        )
    )


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": _by("vllm", "eager", "vllm"),
    "patched": patched,
    "vllm+flashinfer": _by("flashinfer", "eager", "vllm"),
    "torch.compile": compiled,
    "eager": _by("eager", "eager", "eager"),
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
