"""Baselines: the kernel that vLLM serves Qwen3-Next and Qwen3.5 with, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. All write in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _computed(
    state: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """What goes to each token's slot, and `out`."""
    tokens, value_heads = a.shape
    inner, key_dim = out.shape[1], state.shape[1] // out.shape[1]
    keys = (qkv.shape[1] - inner) // 2
    query, key, value = qkv.float().split([keys, keys, inner], 1)
    of = torch.arange(value_heads, device=a.device) * (keys // key_dim) // value_heads
    q, k = (
        torch.rsqrt(each.pow(2).sum(-1, keepdim=True) + 1e-6) * each
        for each in (query.unflatten(1, (-1, key_dim)), key.unflatten(1, (-1, key_dim)))
    )
    q, k = (each[:, of].unsqueeze(2) for each in (q * key_dim**-0.5, k))
    step = torch.nn.functional.softplus(a.float() + dt_bias.float())
    decay = (-A_log.exp() * step).exp().view(tokens, value_heads, 1, 1)
    strength = b.float().sigmoid().view(tokens, value_heads, 1, 1)
    before, there = state[slots.long()], (slots > 0).unsqueeze(1)
    # slot 0 may hold anything, NaN included
    now = before.float().where(there, 0).unflatten(1, (value_heads, -1, key_dim)) * decay
    told = value.unflatten(1, (value_heads, -1)).unsqueeze(-1)
    after = now + (told - (now * k).sum(-1, keepdim=True)) * strength * k
    found = (after * q).sum(-1).flatten(1).where(there, 0)
    return after.flatten(1).to(state.dtype).where(there, before), found.to(out.dtype)


def _with(computed: Callable[..., tuple[Tensor, Tensor]]) -> Baseline:
    def run(
        state: Tensor,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None:
        after, found = computed(state, qkv, a, b, A_log, dt_bias, slots, out)
        # padding writes the contents of slot 0 back, since the host would wait for a mask's size
        state[slots.long()] = after
        out.copy_(found)

    return run


def eager(device: str) -> Baseline:
    return _with(_computed)


def compiled(device: str) -> Baseline:
    # without the writes: Inductor refuses to write to views of one buffer
    return _with(torch.compile(_computed, dynamic=True))


def vllm(device: str) -> Baseline:
    """vLLM 0.33.0's Triton kernel for a step without speculation."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.third_party.flash_linear_attention.ops import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )

    def run(
        state: Tensor,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None:
        tokens, value_heads = a.shape
        key_dim = state.shape[1] // out.shape[1]
        heads = (qkv.shape[1] - out.shape[1]) // 2 // key_dim
        if value_heads % heads:
            raise ImportError("vLLM's kernel wants a whole number of values for each key")
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=qkv,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=key_dim**-0.5,
            initial_state=state.unflatten(1, (value_heads, -1, key_dim)),
            out=out.view(tokens, 1, value_heads, -1),
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
