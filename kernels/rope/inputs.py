"""Seeded inputs of rope, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "ramp", "quarters")
"""`normal` is timed; the judge adds generic regimes (zeros, large, NaN, ...)."""

_POSITIONS = 131072
_BASE = 150000.0
_SCALE = 1.3466
"""gpt-oss: length, base of the frequencies, YaRN's factor on cosines and sines."""


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """`{"query", "key", "cos_sin"}` on the generator's device in the dtypes of the point.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype, table_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "C"))
    tokens, head_dim = axes["tokens"], axes["head_dim"]
    q_shape = (tokens, axes["q_heads"], head_dim)
    k_shape = (tokens, axes["kv_heads"], head_dim)
    query = torch.randn(q_shape, generator=generator, device=device)
    key = torch.randn(k_shape, generator=generator, device=device)
    at = torch.randint(0, _POSITIONS, (tokens, 1), generator=generator, device=device)
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    angles = at * _BASE ** (-half / head_dim)
    match regime:
        case "normal":
            pass
        case "ramp":  # values encode positions, so a swapped head or half shows
            query = torch.linspace(-1.0, 1.0, query.numel(), device=device).view(q_shape)
            key = torch.linspace(1.0, 2.0, key.numel(), device=device).view(k_shape)
        case "quarters":  # multiples of a quarter turn: cosine or sine is 0
            angles = (at % 4) * torch.full_like(half, torch.pi / 2)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    table = _SCALE * torch.cat((angles.cos(), angles.sin()), -1)
    return {"query": query.to(dtype), "key": key.to(dtype), "cos_sin": table.to(table_dtype)}
