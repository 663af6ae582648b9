"""Baselines: the chain of kernels that vLLM launches, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns the written tensors in the
order of the contract. torch.compile is missing: it has no grouped matmul of packed weights.
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


def _baselines_of(name: str) -> dict[str, Any]:
    """What another op's file defines; torch.compile looks up a function's module by its name."""
    place = f"{__name__}.{name}"
    spec = importlib.util.spec_from_file_location(place, _OPS / name / "baselines.py")
    module = sys.modules[place] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


_NORM = _baselines_of("fused_add_rms_norm")["BASELINES"]
_LINEAR, _ROUTE, _GATE_UP, _DOWN, _END = (
    runpy.run_path(str(_OPS / name / "baselines.py"))
    for name in (
        "linear",
        "moe_route",
        "moe_matmul_swiglu",
        "moe_matmul_down",
        "reduce_add_rms_norm",
    )
)


def _eager(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    down_bias: Tensor,
    next_weight: Tensor,
    logits: Tensor,
    chosen: Tensor,
    total: Tensor,
    output: Tensor,
    alpha: float,
    limit: float,
    epsilon: float,
) -> tuple[Tensor, ...]:
    norm, dequantised = _NORM["eager"](input.device.type), _GATE_UP["dequantised"]
    dtype = input.dtype
    x, h = norm(input, residual, weight, epsilon)
    logits = torch.nn.functional.linear(x, router_weight, router_bias if len(router_bias) else None)
    # by bits, not by value: 0 and -0 differ, and NaN has a place
    bits = logits.float().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    found = torch.sort(order, dim=1, descending=True, stable=True).indices[:, : chosen.shape[1]]
    found = found.sort(1).values
    gates = torch.softmax(logits.gather(1, found).float(), 1).to(dtype).float()
    summed = torch.zeros(h.shape, device=h.device)
    # every expert computes every token, since the host does not know which chose it
    for expert in range(len(gate_up_bias)):
        first = dequantised(gate_up_weights[expert], gate_up_scales[expert], gate_up_bias.shape[1])
        second = dequantised(down_weights[expert], down_scales[expert], down_bias.shape[1])
        u = torch.addmm(gate_up_bias[expert], x.float(), first.T)
        gate, up = u[:, ::2].clamp(max=limit), u[:, 1::2].clamp(-limit, limit)
        a = (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(dtype)
        y = torch.addmm(down_bias[expert], a.float(), second.T)
        mine = found == expert
        share = torch.where(mine, gates, 0.0).sum(1, keepdim=True)
        summed += torch.where(mine.any(1, keepdim=True), (share * y).to(dtype).float(), 0.0)
    after, total = norm(summed.to(dtype), h, next_weight, epsilon)
    return logits, found.int(), total, after


def eager(device: str) -> Baseline:
    return _eager


def _vllm(norm: str) -> Callable[[str], Baseline]:
    """vLLM's kernels in turn, the first norm by a baseline of fused_add_rms_norm."""

    def factory(device: str) -> Baseline:
        route, gate_up, down, end = (
            each["BASELINES"]["vllm"](device) for each in (_ROUTE, _GATE_UP, _DOWN, _END)
        )
        first, linear = _NORM[norm](device), _LINEAR["BASELINES"]["eager"](device)

        def run(
            input: Tensor,
            residual: Tensor,
            weight: Tensor,
            router_weight: Tensor,
            router_bias: Tensor,
            *rest: Any,
        ) -> tuple[Tensor, ...]:
            *tensors, alpha, limit, epsilon = rest
            *experts, next_weight, logits, chosen, total, output = tensors
            (tokens, top_k), hidden = chosen.shape, input.shape[1]
            if norm == "vllm":  # it works in place, where the contract keeps both
                output.copy_(input)
                total.copy_(residual)
                first(output, total, weight, epsilon)
                x = output
            else:
                x, total = first(input, residual, weight, epsilon)
            [logits] = linear(x, router_weight, router_bias, logits)
            gates, gather, scatter, *tables = route(logits, chosen, chosen.view(-1))
            histogram, offsets, _, tiles = tables
            inner = experts[2].shape[1] // 2
            a = x.new_empty(tokens * top_k, inner)
            gate_up(x, *experts[:3], gather, histogram, offsets, tiles[0], a, alpha, limit)
            rows, row_map = x.new_empty(tokens * top_k, hidden), scatter.view(tokens, top_k)
            down(a, *experts[3:], gates, row_map, histogram, offsets, tiles[0], rows)
            end(rows, row_map, total, next_weight, output, epsilon)
            # the engine has no such table as `chosen`: a kernel for it alone would only cost time
            return logits, chosen, total, output

        return run

    return factory


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": _vllm("vllm"),
    "vllm+inductor": _vllm("torch.compile"),
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
