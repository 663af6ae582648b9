"""Seeded inputs of decode_attention_fp8, one regime at a time, by those of decode_attention."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

_ATTENTION = runpy.run_path(str(Path(__file__).parent.parent / "decode_attention" / "inputs.py"))
_SCALES = ("unscaled", "apart")

REGIMES = (*_ATTENTION["REGIMES"], *_SCALES)
"""`normal` is timed: each tensor's scale is its largest number over fp8's."""
WINDOW = _ATTENTION["WINDOW"]
LARGEST = 448.0
"""Of float8_e4m3fn."""


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
    dtypes = {name: getattr(torch, dtype) for name, dtype in point.dtypes.items()}
    wide = SimpleNamespace(axes=point.axes, dtypes={**point.dtypes, "T": "float32"})
    given = _ATTENTION["make"](wide, generator, "normal" if regime in _SCALES else regime)
    numbers = {name: given[name] for name in ("query", "key_cache", "value_cache")}
    if regime == "apart":  # another tensor's scale shows
        numbers["query"], numbers["value_cache"] = given["query"] / 8, given["value_cache"] * 16
    scales = {name: each.abs().amax().clamp_min(1e-10) / LARGEST for name, each in numbers.items()}
    if regime == "unscaled":  # as of a checkpoint without scales: numbers beyond are the largest
        numbers["value_cache"] = 128 * given["value_cache"]
        scales = {name: torch.ones_like(scale) for name, scale in scales.items()}
    if not point.axes["scaled"]:
        scales["query"] = torch.ones_like(scales["query"])
    stored = {
        "query": dtypes["Q"],
        "key_cache": dtypes["C"],
        "value_cache": dtypes["C"],
    }
    out = given["out"].to(dtypes["T"])
    return {
        **{name: _stored(each, scales[name], stored[name]) for name, each in numbers.items()},
        "q_scale": scales["query"].expand(point.axes["scaled"]).contiguous(),
        "k_scale": scales["key_cache"].view(1),
        "v_scale": scales["value_cache"].view(1),
        **{name: given[name] for name in ("block_table", "lengths", "window")},
        "sinks": given["sinks"].to(dtypes["T"]),
        "out": out,
    }


def _stored(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers / scale).clamp(-LARGEST, LARGEST).to(dtype)
