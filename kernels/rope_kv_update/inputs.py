"""Seeded inputs of rope_kv_update, one regime at a time."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "padding", "all_padding", "prefill", "ends", "ramp")
"""`normal` is timed: one token from each of many requests, in scattered blocks."""
_BASE, _FACTOR, _ORIGINAL, _FAST, _SLOW = 150000.0, 32.0, 4096, 32.0, 1.0
"""gpt-oss: rope theta, YaRN's factor, original context, beta_fast and beta_slow."""


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
    tokens, head_dim = axes["tokens"], axes["head_dim"]
    q_size, kv_size = axes["q_heads"] * head_dim, axes["kv_heads"] * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    places = axes["blocks"] * axes["block_size"]
    query, key, value = normal(tokens, q_size), normal(tokens, kv_size), normal(tokens, kv_size)
    cache = axes["blocks"], axes["block_size"], axes["kv_heads"], head_dim
    key_cache, value_cache = normal(*cache), normal(*cache)
    bias = normal(axes["biased"] * (q_size + 2 * kv_size))
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
        case "ramp":  # values encode positions, so a swapped head or half shows
            query = torch.linspace(-1.0, 1.0, q_size, device=device).expand_as(query)
            key = torch.linspace(1.0, 2.0, kv_size, device=device).expand_as(key)
            value = torch.linspace(-2.0, -1.0, kv_size, device=device).expand_as(value)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "positions": at,
        "query": query.to(dtype).contiguous(),
        "key": key.to(dtype).contiguous(),
        "value": value.to(dtype).contiguous(),
        "bias": bias.to(dtype),
        "cos_sin": yarn(axes["positions"], head_dim, device).to(table_dtype),
        "slots": slots,
        "key_cache": key_cache.to(dtype),
        "value_cache": value_cache.to(dtype),
    }


def yarn(positions: int, head_dim: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of YaRN's frequencies, times its scale, float32 [positions, head_dim]
    (Peng et al. 2023, "YaRN", sections 3.2 to 3.4; as transformers computes it for gpt-oss).
    """
    half = torch.arange(0, head_dim, 2, dtype=torch.float64)
    frequency = _BASE ** (-half / head_dim)
    low, high = (
        head_dim * math.log(_ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(_BASE))
        for turns in (_FAST, _SLOW)
    )
    ramp = ((half / 2 - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    frequency = frequency * (1 - ramp) + frequency / _FACTOR * ramp
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequency
    scale = 0.1 * math.log(_FACTOR) + 1.0
    return (scale * torch.cat((angles.cos(), angles.sin()), -1)).float().to(device)
