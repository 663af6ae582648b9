"""Baselines: the kernels that vLLM serves Mamba2 with, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. All write in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _computed(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """What goes to each token's slot, and `out`."""
    _, heads, head_dim, state_size = state.shape
    before, there = state[slots.long()], (slots > 0).view(-1, 1, 1, 1)
    inner = x.float().view(-1, heads, head_dim, 1)
    step = torch.nn.functional.softplus(dt.float() + dt_bias.float()).view(-1, heads, 1, 1)
    group = heads * state_size // B.shape[1]
    b, c = (
        each.float().view(len(x), -1, 1, state_size).repeat_interleave(group, 1) for each in (B, C)
    )
    decay = (A.view(heads, 1, 1) * step).exp()
    # slot 0 may hold anything, NaN included
    after = before.float().where(there, 0) * decay + step * b * inner
    found = (after * c).sum(-1, keepdim=True) + D.float().view(heads, 1, 1) * inner
    found = found.view(x.shape)
    if z.numel():
        found = found * torch.nn.functional.silu(z.float())
    return after.to(state.dtype).where(there, before), found.to(x.dtype)


def _with(computed: Callable[..., tuple[Tensor, Tensor]]) -> Baseline:
    def run(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None:
        after, found = computed(state, x, dt, dt_bias, A, B, C, D, z, slots)
        # padding writes the contents of slot 0 back, since the host would wait for a mask's size
        state[slots.long()] = after
        out.copy_(found)

    return run


def eager(device: str) -> Baseline:
    return _with(_computed)


def compiled(device: str) -> Baseline:
    # without the writes: Inductor refuses to write to views of one buffer
    return _with(torch.compile(_computed, dynamic=True))


def _called(update: Callable[..., Any], padding: str, **more: Any) -> Baseline:
    """A kernel of the engine, called as vLLM 0.33.0 calls it (mamba_mixer2.py, ssu_dispatch.py).

    Args:
        padding: its name for the slot of padding.
    """

    def run(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None:
        _, heads, head_dim, state_size = state.shape
        update(
            state,
            x.view(-1, heads, head_dim),
            dt.unsqueeze(-1).expand(-1, -1, head_dim),
            A.view(-1, 1, 1).expand(-1, head_dim, state_size),
            B.view(len(x), -1, state_size),
            C.view(len(x), -1, state_size),
            D=D.unsqueeze(-1).expand(-1, head_dim),
            z=z.view(-1, heads, head_dim) if z.numel() else None,
            dt_bias=dt_bias.unsqueeze(-1).expand(-1, head_dim),
            dt_softplus=True,
            state_batch_indices=slots,
            dst_state_batch_indices=slots,
            out=out.view(-1, heads, head_dim),
            **{padding: 0},
            **more,
        )

    return run


def vllm(device: str) -> Baseline:
    """vLLM's default, a Triton kernel."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
    from vllm.platforms import current_platform

    blackwell = current_platform.is_device_capability_family(100)
    return _called(selective_state_update, "null_block_id", is_blackwell=blackwell)


def flashinfer(device: str) -> Baseline:
    """What vLLM runs with `--mamba-backend flashinfer`."""
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.mamba import selective_state_update

    return _called(selective_state_update, "pad_slot_id", algorithm="auto")


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
