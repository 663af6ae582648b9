"""Regimes of inputs for every op, besides those of its own `inputs.py`.

A regime of the judge changes the tensors with free values in the contract (`values = "any"`);
indices and tables stay as the op made them. An op that names the same regime makes it itself. For a
narrow dtype the numbers are changed and encoded again. If it has no infinities, `inf` plants its
largest number and `large` is clipped there; if it has no NaN, `nan` plants the largest number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from patcher.bench.judge import op_calls
from patcher.bench.ops.codes import decode, encode
from patcher.bench.ops.contract import Point
from patcher.bench.ops.dtypes import DTYPES, Dtype, dtype_of
from patcher.bench.ops.op import Op

INFINITE = "inf"
EACH = ("zeros", "ones", "one_hot", "negative_zero", "denormal", "nan", INFINITE)
"""Regimes that are also tried on each tensor alone, since one tensor can hide another."""
ALIKE = {"zeros", "ones", "one_hot"}
"""Regimes in which the terms of a sum may be alike, but for one."""
ALL = ("large", "small")
EXACT = "exact"
_LARGE, _SMALL = {"float16": 16.0}, 1e-4
_DENORMAL = {"float16": 2.0**-20}
"""Factors that make standard normal values subnormal: 2^-130 for float32's exponents."""


def regimes_of(op: Op) -> list[str]:
    """The op's own regimes, with `normal` first, then the judge's."""
    exact = [EXACT] if op.contract.accuracy.exact else []
    return list(dict.fromkeys([*op.inputs.REGIMES, *EACH, *ALL, *exact]))


def free(op: Op) -> list[str]:
    """Tensors whose values a regime of the judge may change."""
    floats = {name for name, dtype in DTYPES.items() if not dtype.exact}
    return [
        tensor.name
        for tensor in op.contract.tensors
        if tensor.values == "any"
        and tensor.access != "write"
        and set(op.contract.dtypes[tensor.dtype]) & floats
    ]


def targets(op: Op, regime: str) -> list[str]:
    """Tensors on which a regime is tried alone, besides all at once."""
    names = free(op)
    own = regime in op.inputs.REGIMES
    return names if regime in EACH and not own and len(names) > 1 else []


def changed(op: Op, regime: str, only: str = "") -> set[str]:
    """Tensors whose values may be others in a regime than in `normal`."""
    if regime == "normal":
        return set()
    if regime in op.inputs.REGIMES:
        return {tensor.name for tensor in op.contract.tensors}
    if regime == EXACT:
        return set(op.contract.accuracy.exact)
    return {only} if only else set(free(op))


def make(
    op: Op, point: Point, seed: int, regime: str, device: str, only: str = ""
) -> dict[str, Tensor]:
    """Seeded values of all tensors on the device; tensors that are only written are poisoned."""
    generator = torch.Generator(device).manual_seed(seed)
    own = regime in op.inputs.REGIMES
    with op_calls.running(op, "inputs.py", "make"):
        given = op.inputs.make(point, generator, regime if own else "normal")
    values = op_calls.checked_inputs(op, point, given)
    if own:
        return values
    if regime == EXACT:
        return _exact(op, point, values, generator)
    chooser = random.Random(seed)
    chosen = [name for name in ([only] if only else free(op)) if values[name].numel()]
    return values | {name: _changed(values[name], regime, chooser) for name in chosen}


def require_seeded(op: Op, points: Sequence[Point], device: str) -> None:
    """Check at the smallest of the points that equal seeds give equal inputs.

    Raises:
        UsageError: they do not.
    """
    sizes = [sum(math.prod(op.contract.shape(t, p)) for t in op.contract.tensors) for p in points]
    point = points[sizes.index(min(sizes))]
    op_calls.check_seeded(op, *(make(op, point, 1, "normal", device) for _ in range(2)))


def _changed(value: Tensor, regime: str, chooser: random.Random) -> Tensor:
    dtype = dtype_of(value.dtype)
    if dtype.narrow:
        return encode(_made(decode(value), regime, chooser, dtype), dtype)
    return _made(value, regime, chooser, dtype)


def _made(value: Tensor, regime: str, chooser: random.Random, dtype: Dtype) -> Tensor:
    match regime:
        case "zeros":
            return torch.zeros_like(value)
        case "ones":
            return torch.ones_like(value)
        case "one_hot":
            hot = torch.zeros_like(value)
            rows = hot.view(-1, hot.shape[-1])
            chosen = [chooser.randrange(rows.shape[1]) for _ in range(len(rows))]
            # in one step, since a row at a time takes as many launches of a kernel
            rows[torch.arange(len(rows)), torch.tensor(chosen, dtype=torch.int64)] = 1.0
            return hot
        case "negative_zero":
            return torch.where(value > 0, value, torch.full_like(value, -0.0))
        case "nan" | "inf":
            changed = value.clone()
            for _ in range(chooser.randint(1, 3)):
                sign = chooser.choice((-1.0, 1.0))
                planted = math.nan if regime == "nan" else sign * math.inf
                changed.view(-1)[chooser.randrange(changed.numel())] = planted
            return changed
        case "large":
            return value * (dtype.finite_max / 2 if dtype.narrow else _LARGE.get(dtype.name, 1e4))
        case "small":  # in a narrow dtype near its smallest normal numbers
            lowest = max(4 * dtype.smallest_normal, _SMALL)
            return value * (min(lowest, 1.0) if dtype.narrow else _SMALL)
        case "denormal":
            factor = dtype.smallest_normal / 2 if dtype.narrow else 2.0**-130
            return value * _DENORMAL.get(dtype.name, factor)
    raise ValueError(f"unknown regime {regime!r}")


def _exact(
    op: Op, point: Point, values: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Values from {0, 1}, so sparse that every sum is an integer that each dtype can hold."""
    names = op.contract.accuracy.exact
    outputs = [DTYPES[point.dtypes[tensor.dtype]] for tensor in op.contract.compared]
    limit = min(2.0 / dtype.eps for dtype in outputs)
    longest = op.contract.longest_sum(point)
    chance = min(0.5, math.sqrt(limit / (4 * longest)))
    changed = dict(values)
    for name in names:
        value = values[name]
        shape = decode(value).shape
        drawn = torch.rand(shape, generator=generator, device=value.device) < chance
        changed[name] = encode(drawn.double(), dtype_of(value.dtype))
    return changed
