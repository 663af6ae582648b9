"""Seeded inputs of mamba2_decode, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "padding", "all_padding", "ends", "forgets", "remembers", "first", "ramp")
"""`normal` is timed: one token of each of many requests, in scattered slots."""
_STEPS, _DECAYS = (1e-3, 1e-1), (1.0, 16.0)
"""Where Mamba2 starts its training: steps by dt_bias alone, and -A (mamba_ssm's Mamba2)."""


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
    tokens, groups, state_size = axes["tokens"], axes["groups"], axes["state_size"]
    heads, head_dim = axes["group"] * groups, axes["head_dim"]
    inner = heads * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    state = normal(axes["slots"], heads, head_dim, state_size)
    x, z = normal(tokens, inner), normal(tokens, axes["gated"] * inner)
    b, c = normal(tokens, groups * state_size), normal(tokens, groups * state_size)
    steps = between(math.log(_STEPS[0]), math.log(_STEPS[1]), heads).exp()
    dt, dt_bias = normal(tokens, heads), steps.expm1().log()  # softplus of it is the step
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
            dt = between(19, 60, tokens, heads)
        case "remembers":  # the step is so short that the state stays as it is
            dt = between(-60, -12, tokens, heads)
        case "first":  # a request's first token
            state = torch.zeros_like(state)
        case "ramp":  # values encode positions, so a swapped head, group or element shows
            x = torch.linspace(-1.0, 1.0, inner, device=device).expand_as(x)
            b = torch.linspace(1.0, 2.0, b.shape[1], device=device).expand_as(b)
            c = torch.linspace(2.0, 1.0, c.shape[1], device=device).expand_as(c)
            state = torch.linspace(-1.0, 1.0, state[0].numel(), device=device).view(
                state.shape[1:]
            ) + normal(axes["slots"], 1, 1, 1)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "state": state.to(kept).contiguous(),
        "x": x.to(dtype).contiguous(),
        "dt": dt.to(dtype),
        "dt_bias": dt_bias.to(dtype),
        "A": -between(*_DECAYS, heads),
        "B": b.to(dtype).contiguous(),
        "C": c.to(dtype).contiguous(),
        "D": (1 + normal(heads) / 8).to(dtype),
        "z": z.to(dtype),
        "slots": slots.to(index),
        "out": torch.zeros(tokens, inner, dtype=dtype, device=device),
    }
