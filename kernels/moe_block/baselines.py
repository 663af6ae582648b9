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


def _eagerly(kept: Callable[[Tensor, torch.dtype], Tensor]) -> Baseline:
    """The block in float32, with `kept` of what an engine stores in T between its kernels."""

    def run(
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
        dtype, dequantised = input.dtype, _GATE_UP["dequantised"]

        def keep(value: Tensor) -> Tensor:
            return kept(value, dtype)

        def normed(rows: Tensor, gain: Tensor) -> Tensor:
            return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon) * gain.float()

        h = keep(residual.float() + input.float())
        x = keep(normed(h, weight))
        bias = router_bias.float() if len(router_bias) else None
        logits = torch.nn.functional.linear(x, router_weight.float(), bias).to(dtype)
        # by bits, not by value: 0 and -0 differ, and NaN has a place
        bits = logits.float().view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        found = torch.sort(order, dim=1, descending=True, stable=True).indices
        found = found[:, : chosen.shape[1]].sort(1).values
        gates = torch.softmax(logits.gather(1, found).float(), 1)
        summed = torch.zeros_like(h)
        # every expert computes every token, since the host does not know which chose it
        for e in range(len(gate_up_bias)):
            wide = dequantised(gate_up_weights[e], gate_up_scales[e], gate_up_bias.shape[1])
            u = torch.addmm(gate_up_bias[e], x, wide.T)
            gate, up = u[:, ::2].clamp(max=limit), u[:, 1::2].clamp(-limit, limit)
            a = keep(gate * torch.sigmoid(alpha * gate) * (up + 1))
            wide = dequantised(down_weights[e], down_scales[e], down_bias.shape[1])
            mine = found == e
            share = torch.where(mine, gates, 0.0).sum(1, keepdim=True)
            row = keep(share * torch.addmm(down_bias[e], a, wide.T))
            summed += torch.where(mine.any(1, keepdim=True), row, 0.0)
        total = h + keep(summed)
        output = normed(keep(total), next_weight)
        return logits, found.int(), total.to(dtype), output.to(dtype)

    return run


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).float()


def eager(device: str) -> Baseline:
    return _eagerly(_rounded)


def rounded_twice_as_far(device: str) -> Baseline:
    """Eager, where each rounding between kernels errs twice as much.

    A few roundings are in all numbers of a token: another kernel's can be as right and yet larger.
    """
    return _eagerly(lambda value, dtype: 2 * _rounded(value, dtype) - value)


ACCURACY = rounded_twice_as_far
"""What limits a candidate's error; it is never timed."""


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
"""The baseline that ACCURACY is made of."""
