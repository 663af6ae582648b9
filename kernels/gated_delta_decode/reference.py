"""gated_delta_decode in plain PyTorch: reference, unchanged elements and control."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the sum of squares of a query or a key."""


def reference(
    state: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    out: Tensor,
) -> dict[str, Tensor]:
    """The float64 values of the whole `state` and of `out`.

    Args:
        state: [slots, value_heads * value_dim * key_dim], any float dtype.
        qkv: [tokens, 2 * heads * key_dim + value_heads * value_dim], any float dtype.
        a, b: [tokens, value_heads].
        A_log, dt_bias: [value_heads].
        slots: [tokens], integers; 0 is padding.
        out: [tokens, value_heads * value_dim], not read.
    """
    written, found = _computed(state, qkv, a, b, A_log, dt_bias, slots, out, torch.float64)
    whole, there = state.to(torch.float64, copy=True), slots > 0
    whole[slots[there].long()] = written[there]
    return {"state": whole, "out": found}


def control(
    state: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    out: Tensor,
) -> dict[str, Tensor]:
    """`reference` with products and sums rounded to bfloat16; other elements are unchanged."""
    written, found = _computed(state, qkv, a, b, A_log, dt_bias, slots, out, torch.bfloat16)
    whole, there = state.clone(), slots > 0
    whole[slots[there].long()] = written[there].to(state.dtype)
    return {"state": whole, "out": found.to(out.dtype)}


def kept(state: Tensor, slots: Tensor, **others: Tensor) -> dict[str, Tensor]:
    """A mask of the elements of `state` in slots of no token."""
    stays = torch.ones(len(state), dtype=torch.bool, device=state.device)
    stays[slots[slots > 0].long()] = False
    return {"state": stays.view(-1, 1).expand_as(state)}


def _computed(
    state: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    out: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The new state of each token, [tokens, value_heads * value_dim * key_dim], and `out`."""
    tokens, value_heads = a.shape
    value_dim = out.shape[1] // value_heads
    key_dim = state.shape[1] // out.shape[1]
    keys = (qkv.shape[1] - out.shape[1]) // 2
    query, key, value = qkv.to(dtype).split([keys, keys, out.shape[1]], 1)
    heads = keys // key_dim
    of = torch.arange(value_heads, device=qkv.device) * heads // value_heads
    q, k = (each.reshape(tokens, heads, key_dim)[:, of] for each in (query, key))
    q, k = (each / (each.pow(2).sum(-1, keepdim=True) + EPSILON).sqrt() for each in (q, k))
    q, k = q.unsqueeze(2) / key_dim**0.5, k.unsqueeze(2)
    step = torch.nn.functional.softplus(a.to(dtype) + dt_bias.to(dtype))
    decay = (-A_log.to(dtype).exp() * step).exp()
    before = state[slots.long()].to(dtype)
    before[slots == 0] = 0
    now = before.view(tokens, value_heads, value_dim, key_dim) * decay.view(tokens, -1, 1, 1)
    told = value.reshape(tokens, value_heads, value_dim, 1)
    change = (told - (now * k).sum(-1, keepdim=True)) * b.to(dtype).sigmoid().view(tokens, -1, 1, 1)
    after = now + change * k
    found = (after * q).sum(-1).view(tokens, -1)
    return after.view(tokens, -1), found.masked_fill((slots == 0).unsqueeze(1), 0)
