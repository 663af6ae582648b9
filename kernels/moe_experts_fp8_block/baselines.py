"""Baselines: vLLM's Triton experts, torch.compile, eager.

A factory raises ImportError with the reason where the baseline does not run. A baseline returns
(output,). flashinfer's cutlass_fused_moe is none: it takes up before gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _eager(*tensors: Tensor) -> tuple[Tensor]:
    x, w1, w1_scale, w2, w2_scale, gains, ids, _ = tensors
    # every expert for every token, so that no size depends on the router
    block = x.shape[1] // w1_scale.shape[2]
    first, second = (
        weight.float() * scale.repeat_interleave(block, 1).repeat_interleave(block, 2)
        for weight, scale in ((w1, w1_scale), (w2, w2_scale))
    )
    gate, up = (
        (_narrowed(x.float(), block) @ first.flatten(0, 1).T)
        .unflatten(1, (len(w1), -1))
        .chunk(2, 2)
    )
    inner = _narrowed(torch.nn.functional.silu(gate) * up, block)
    chosen = ids.unsqueeze(2) == torch.arange(len(w1), device=x.device)
    inner = inner * (gains.unsqueeze(2) * chosen).sum(1).unsqueeze(2)
    return ((inner.flatten(1) @ second.transpose(1, 2).flatten(0, 1)).to(x.dtype),)


def _narrowed(rows: Tensor, block: int) -> Tensor:
    """Rows in fp8 with a scale for each block, as engines have them before a matmul."""
    parts = rows.unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    codes = (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0: what its Triton backend of fp8 experts computes."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def run(*tensors: Tensor) -> tuple[Tensor]:
        x, w1, w1_scale, w2, w2_scale, gains, ids, _ = tensors
        block = x.shape[1] // w1_scale.shape[2]
        config = fp8_w8a8_moe_quant_config(w1_scale, w2_scale, block_shape=[block, block])
        found: Tensor = fused_experts(x, w1, w2, gains, ids, quant_config=config)
        return (found,)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The yardstick of a candidate's error."""
