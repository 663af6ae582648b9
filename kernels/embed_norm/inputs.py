"""Seeded inputs of embed_norm, one regime at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "spikes", "ramp", "faint", "ends")
"""`normal` is timed."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract in the point's dtypes.

    Raises:
        ValueError: unknown regime.
    """
    device = generator.device
    tokens, vocab, hidden = (point.axes[name] for name in ("tokens", "vocab", "hidden"))
    dtype, gain, index = (getattr(torch, point.dtypes[symbol]) for symbol in "TWI")
    ids = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    table = torch.randn(vocab, hidden, generator=generator, device=device)
    weight = 1.0 + 0.25 * torch.randn(hidden, generator=generator, device=device)
    match regime:
        case "normal":
            table = table * 0.02
        case "spikes":  # one element per row dominates the norm
            column = torch.randint(0, hidden, (vocab, 1), generator=generator, device=device)
            table = (table * 0.05).scatter(1, column, 60.0)
        case "ramp":  # values encode positions, so a swapped or skipped element shows
            rows = torch.arange(vocab, device=device).unsqueeze(1) / 8
            table = torch.linspace(-1.0, 1.0, hidden, device=device) + rows
        case "faint":  # epsilon dominates
            table = table * 1e-4
        case "ends":  # the first and the last row of the table
            ids = torch.where(ids % 2 == 0, 0, vocab - 1)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    return {
        "ids": ids.to(index),
        "table": table.to(dtype),
        "weight": weight.to(gain),
        **{
            name: torch.full((tokens, hidden), math.nan, dtype=dtype, device=device)
            for name in ("residual", "output")
        },
    }
