"""Seeded inputs of gated_delta_decode, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = (
    *("normal", "padding", "all_padding", "ends", "forgets", "remembers", "replaces", "first"),
    "ramp",
)
"""`normal` is timed: one token of each of many requests, in scattered slots."""
_DECAYS = (2**-4, 16.0)
"""Where Qwen3-Next starts its training: exp(A_log) is uniform, up to 16; dt_bias is 1."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, kept, index = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "S", "I"))
    tokens, value_heads, key_dim = axes["tokens"], axes["value_heads"], axes["key_dim"]
    inner, keys = value_heads * axes["value_dim"], axes["heads"] * key_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    state = normal(axes["slots"], inner * key_dim) / math.sqrt(key_dim)
    qkv = normal(tokens, 2 * keys + inner)
    a, b = normal(tokens, value_heads) - 4, normal(tokens, value_heads)
    dt_bias, decays = 1 + normal(value_heads) / 4, between(*_DECAYS, value_heads)
    slots = 1 + torch.randperm(axes["slots"] - 1, generator=generator, device=device)[:tokens]
    match regime:
        case "normal":
            pass
        case "padding":  # some tokens, and the last ones, as in a graph for more requests
            slots = slots.masked_fill(between(0, 1, tokens) < 0.3, 0)
            slots[-1] = 0
            state[0] = math.nan  # nobody's state
        case "all_padding":  # as in a profiling run
            slots = torch.zeros_like(slots)
        case "ends":  # the first slots, and the last one
            slots = torch.arange(1, tokens + 1, device=device)
            slots[-1] = axes["slots"] - 1
        case "forgets":  # the step is so long that nothing is left of the state
            a, decays = between(19, 60, tokens, value_heads), between(8, 16, value_heads)
        case "remembers":  # the step is so short that the state decays by nothing
            a = between(-60, -20, tokens, value_heads)
        case "replaces":  # what the state holds for a key is replaced whole
            b = between(19, 60, tokens, value_heads)
        case "first":  # a request's first token
            state = torch.zeros_like(state)
        case "ramp":  # values encode positions, so a swapped head or element shows
            qkv = torch.linspace(-1.0, 2.0, qkv.shape[1], device=device).expand_as(qkv)
            row = torch.linspace(-1.0, 1.0, state.shape[1], device=device)
            state = row + normal(axes["slots"], 1)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "state": state.to(kept).contiguous(),
        "qkv": qkv.to(dtype).contiguous(),
        "a": a.to(dtype),
        "b": b.to(dtype),
        "A_log": decays.log(),
        "dt_bias": dt_bias.to(dtype),
        "slots": slots.to(index),
        "out": torch.zeros(tokens, inner, dtype=dtype, device=device),
    }
