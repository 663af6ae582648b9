"""Seeded inputs of qkv_rope_kv_update, one regime at a time."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
_LINEAR, _ROPE = (
    runpy.run_path(str(_OPS / name / "inputs.py")) for name in ("linear", "rope_kv_update")
)
_PLACES = ("padding", "all_padding", "prefill", "ends")

REGIMES = ("normal", *_PLACES, "heads", "ramp", "cancellation", "spikes")
"""`normal` is timed: one token from each of many requests, in scattered blocks. Regimes of tokens
and slots are those of rope_kv_update, those of numbers those of linear."""


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
    if regime not in REGIMES:
        raise ValueError(f"unknown regime {regime!r}")
    axes, device = point.axes, generator.device
    outer = (axes["q_heads"] + 2 * axes["kv_heads"]) * axes["head_dim"]
    layer = SimpleNamespace(axes={**axes, "outer": outer}, dtypes=point.dtypes)
    numbers = "normal" if regime in (*_PLACES, "heads") else regime
    found = _LINEAR["make"](layer, generator, numbers)
    cached = _ROPE["make"](point, generator, regime if regime in _PLACES else "normal")
    if regime == "heads":  # outputs encode their row of the weight, so a swapped half shows
        steps = torch.linspace(-2.0, 2.0, outer, device=device).unsqueeze(1) / axes["inner"]
        found["weight"] = steps.to(found["weight"].dtype).expand_as(found["weight"]).contiguous()
        found["x"] = 1.0 + found["x"] / 8
    shape = axes["tokens"], axes["q_heads"] * axes["head_dim"]
    query = torch.full(shape, math.nan, dtype=found["x"].dtype, device=device)
    return {
        **{name: found[name] for name in ("x", "weight", "bias")},
        **{name: cached[name] for name in ("positions", "cos_sin", "slots")},
        "query": query,
        **{name: cached[name] for name in ("key_cache", "value_cache")},
    }
