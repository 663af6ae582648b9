"""Seeded inputs of qk_norm_rope, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "large", "small", "spikes", "ramp", "quarters")
"""`normal` is timed; the judge adds generic regimes (zeros, ones, NaN, ...)."""

_POSITIONS = 40960
_BASE = 1000000.0
"""Qwen3: length, base of the frequencies."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"query", "key", "q_weight", "k_weight", "cos_sin"}` on the generator's device in the dtypes
    of the point.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, table_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "C"))
    tokens, head_dim = axes["tokens"], axes["head_dim"]
    heads = [
        torch.randn(tokens, axes[name], head_dim, generator=generator, device=device)
        for name in ("q_heads", "kv_heads")
    ]
    weights = [
        1.0 + 0.25 * torch.randn(head_dim, generator=generator, device=device) for _ in range(2)
    ]
    at = torch.randint(0, _POSITIONS, (tokens, 1), generator=generator, device=device)
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    angles = at * _BASE ** (-half / head_dim)
    match regime:
        case "normal":
            pass
        case "large":  # squares stay finite in float32, not in float16
            heads = [each * 1e3 for each in heads]
        case "small":  # epsilon dominates
            heads = [each * 1e-4 for each in heads]
        case "spikes":  # one element of each head dominates its norm
            heads = [_with_spikes(each * 0.05, generator) for each in heads]
        case "ramp":  # values encode positions, so a swapped head or half shows
            heads = [_ramp(each.shape, device) for each in heads]
        case "quarters":  # multiples of a quarter turn: cosine or sine is 0
            angles = (at % 4) * torch.full_like(half, torch.pi / 2)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    query, key = (each.flatten(1).to(dtype) for each in heads)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    return {
        "query": query,
        "key": key,
        "q_weight": weights[0].to(dtype),
        "k_weight": weights[1].to(dtype),
        "cos_sin": table.to(table_dtype),
    }


def _with_spikes(heads: Tensor, generator: torch.Generator) -> Tensor:
    shape, last = (*heads.shape[:-1], 1), heads.shape[-1]
    column = torch.randint(0, last, shape, generator=generator, device=heads.device)
    return heads.scatter(-1, column, 60.0)


def _ramp(shape: torch.Size, device: torch.device) -> Tensor:
    tokens, heads, _ = (torch.arange(size, device=device) for size in shape)
    columns = torch.linspace(-1.0, 1.0, shape[-1], device=device)
    return columns + heads.view(-1, 1) / 4 + tokens.view(-1, 1, 1) / 8
