"""mamba2_decode in plain PyTorch: reference, unchanged elements and control."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
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
) -> dict[str, Tensor]:
    """The float64 values of the whole `state` and of `out`.

    Args:
        state: [slots, heads, head_dim, state_size], any float dtype.
        x: [tokens, heads * head_dim], any float dtype.
        dt: [tokens, heads].
        dt_bias, A, D: [heads].
        B, C: [tokens, groups * state_size].
        z: [tokens, heads * head_dim], or [tokens, 0] for none.
        slots: [tokens], integers; 0 is padding.
        out: [tokens, heads * head_dim], not read.
    """
    written, found = _computed(state, x, dt, dt_bias, A, B, C, D, z, slots, torch.float64)
    whole, there = state.to(torch.float64, copy=True), slots > 0
    whole[slots[there].long()] = written[there]
    return {"state": whole, "out": found}


def control(
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
) -> dict[str, Tensor]:
    """`reference` with products and sums rounded to bfloat16; other elements are unchanged."""
    written, found = _computed(state, x, dt, dt_bias, A, B, C, D, z, slots, torch.bfloat16)
    whole, there = state.clone(), slots > 0
    whole[slots[there].long()] = written[there].to(state.dtype)
    return {"state": whole, "out": found.to(out.dtype)}


def kept(state: Tensor, slots: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """A mask of the elements of `state` in slots of no token."""
    stays = torch.ones(len(state), dtype=torch.bool, device=state.device)
    stays[slots[slots > 0].long()] = False
    return {"state": stays.view(-1, 1, 1, 1).expand_as(state)}


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
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The new state of each token, [tokens, heads, head_dim, state_size], and `out`."""
    _, heads, head_dim, state_size = state.shape
    before = state[slots.long()].to(dtype)
    before[slots == 0] = 0
    inner = x.view(-1, heads, head_dim, 1).to(dtype)
    step = torch.nn.functional.softplus(dt.to(dtype) + dt_bias.to(dtype)).view(-1, heads, 1, 1)
    group = heads * state_size // B.shape[1]
    b, c = (
        each.view(len(x), -1, 1, state_size).to(dtype).repeat_interleave(group, 1)
        for each in (B, C)
    )
    decay = (A.to(dtype).view(heads, 1, 1) * step).exp()
    after = before * decay + step * b * inner
    found = (after * c).sum(-1, keepdim=True) + D.to(dtype).view(heads, 1, 1) * inner
    found = found.view(x.shape)
    if z.numel():
        gate = z.to(dtype)
        found = found * (gate * gate.sigmoid())
    return after, found
