"""Seeded inputs of moe_block, one regime at a time."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
_START = runpy.run_path(str(_OPS / "add_rms_norm_route" / "inputs.py"))
_EXPERTS = runpy.run_path(str(_OPS / "moe_matmul_swiglu" / "inputs.py"))

REGIMES = (*_START["REGIMES"], "scales", "clamped", "one_hot")
"""`normal` is timed; the judge adds generic regimes (zeros, NaN, ...), but for the block's own
`ones` and `large`, as in add_rms_norm_route, and `one_hot`: the judge's gains of one element would
leave a few numbers of output, too few to compare the errors of roundings before."""


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
    dtype, weight_dtype = (getattr(torch, point.dtypes[symbol]) for symbol in ("T", "W"))
    tokens, hidden, inner = axes["tokens"], axes["hidden"], axes["inner"]
    experts = axes["experts"]
    start = _START["make"](point, generator, regime if regime in _START["REGIMES"] else "normal")

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    kind = "scales" if regime == "scales" else "normal"
    gate_up = _EXPERTS["packed"](experts, 2 * inner, hidden, generator, kind)
    down = _EXPERTS["packed"](experts, hidden, inner, generator, kind)
    # what the activation gives is large where sums are long: results stay of order one to ten
    smaller = (inner // 256).bit_length()
    weight, router = start["weight"], start["router_weight"]
    if regime == "normal" and tokens > 1:  # epsilon is as large as a token's mean square
        for name in ("input", "residual"):
            start[name][-1] /= 256
    if regime == "clamped":  # most sums exceed the limit, and the logits are the usual ones
        weight, router = weight * 16, router / 16
    if regime == "one_hot":  # each token in turn shows the weights of one or two of its numbers
        for name in ("input", "residual"):
            hot = torch.rand(tokens, hidden, generator=generator, device=device).argmax(1)
            start[name] = torch.nn.functional.one_hot(hot, hidden).to(dtype)
    first = ("input", "residual", "weight", "router_weight", "router_bias")
    return {
        **{name: start[name] for name in first},
        "weight": weight,
        "router_weight": router,
        "gate_up_weights": gate_up["weights"],
        "gate_up_scales": gate_up["scales"],
        "gate_up_bias": 3.0 * normal(experts, 2 * inner),  # some sums exceed the limit
        "down_weights": down["weights"],
        "down_scales": down["scales"] - smaller * (down["scales"] > 0).to(torch.uint8),
        "down_bias": normal(experts, hidden),
        "next_weight": (1.0 + 0.25 * normal(hidden)).to(weight_dtype),
        "logits": start["logits"],
        "chosen": torch.full((tokens, axes["top_k"]), -1, dtype=torch.int32, device=device),
        **{
            name: torch.full((tokens, hidden), math.nan, dtype=dtype, device=device)
            for name in ("total", "output")
        },
    }
