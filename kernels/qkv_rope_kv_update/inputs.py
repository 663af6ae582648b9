"""Seeded inputs of qkv_rope_kv_update, one regime at a time."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_yarn = runpy.run_path(str(Path(__file__).parent.parent / "rope_kv_update" / "inputs.py"))["yarn"]

REGIMES = ("normal", "padding", "all_padding", "prefill", "ends", "ramp", "cancellation", "spikes")
"""`normal` is timed: one token from each of many requests, in scattered blocks."""


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
    dtype, table_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "C"))
    tokens, inner, head_dim = axes["tokens"], axes["inner"], axes["head_dim"]
    outer = (axes["q_heads"] + 2 * axes["kv_heads"]) * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    places = axes["blocks"] * axes["block_size"]
    x, weight = normal(tokens, inner), normal(outer, inner) / math.sqrt(inner)
    bias = normal(axes["biased"] * outer)
    cache = axes["blocks"], axes["block_size"], axes["kv_heads"], head_dim
    key_cache, value_cache = normal(*cache), normal(*cache)
    at = torch.randint(0, axes["positions"], (tokens,), generator=generator, device=device)
    slots = torch.randperm(places, generator=generator, device=device)[:tokens]
    match regime:
        case "normal":
            pass
        case "padding":  # some slots, and the last ones, as in a graph for more tokens
            away = torch.rand(tokens, generator=generator, device=device) < 0.3
            away[-1] = True
            slots = slots.masked_fill(away, -1)
        case "all_padding":  # as in a profiling run
            slots = torch.full_like(slots, -1)
        case "prefill":  # consecutive tokens
            slots = torch.arange(tokens, device=device) + (places - tokens) // 2
            at = torch.arange(tokens, device=device) % axes["positions"]
        case "ends":  # the first and the last entry of the table and of the cache
            at = torch.where(at % 2 == 0, 0, axes["positions"] - 1)
            slots = slots.clone()
            slots[0] = places - 1
            slots[1:] = torch.arange(tokens - 1, device=device)
        case "ramp":  # outputs encode their row of the weight, so a swapped head or half shows
            weight = (
                torch.linspace(-2.0, 2.0, outer, device=device).unsqueeze(1) / inner + 0 * weight
            )
            x = 1.0 + torch.arange(tokens, device=device).unsqueeze(1) / 8 + 0 * x
        case "cancellation":  # one half of a sum cancels the other
            half = inner // 2
            x[:, half : 2 * half] = -x[:, :half]
            weight[:, half : 2 * half] = weight[:, :half] * (1 + 2**-6)
        case "spikes":  # one element per row dominates the sum
            column = torch.randint(0, inner, (tokens, 1), generator=generator, device=device)
            x = (x * 0.05).scatter(1, column, 60.0)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "x": x.to(dtype),
        "weight": weight.to(dtype),
        "bias": bias.to(dtype),
        "positions": at,
        "cos_sin": _yarn(axes["positions"], head_dim, device).to(table_dtype),
        "slots": slots,
        "query": torch.full((tokens, axes["q_heads"] * head_dim), math.nan, device=device).to(
            dtype
        ),
        "key_cache": key_cache.to(dtype),
        "value_cache": value_cache.to(dtype),
    }
