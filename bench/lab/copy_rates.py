"""`python -m patcher.bench.lab copies`: memory bandwidth of several access methods.

The results justify the methods of `ceilings.py`: one that is slower than a kernel is no ceiling. It
prints one JSON line per method and size, with GB/s (bytes read plus written) over interleaved
turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from patcher.bench.judge.ceilings import seconds_of, seconds_of_each
from patcher.bench.machine.environment import device_name

SIZES = (1 << 21, 1 << 22, 1 << 23, 1 << 30)
TURNS = 5


def copy_rates() -> None:
    if not torch.cuda.is_available():
        print("copies: there is no GPU here", flush=True)
        return
    for size in SIZES:
        rates: dict[str, list[float]] = {}
        for _ in range(TURNS):
            for name, moved, seconds in _ways(size):
                rates.setdefault(name, []).append(moved / seconds() / 1e9)
        for name, values in rates.items():
            row = {
                "device": device_name("cuda"),
                "torch": torch.__version__,
                "way": name,
                "bytes": size,
                "gb_s": round(statistics.median(values)),
                "least": round(min(values)),
                "most": round(max(values)),
                "turns": TURNS,
            }
            print(json.dumps(row), flush=True)


def _ways(size: int) -> list[tuple[str, int, Callable[[], float]]]:
    """Each method's name, bytes read and written per call, and timing function."""
    source = torch.ones(size // 4, device="cuda")
    target, total = torch.empty_like(source), torch.empty((), device="cuda")
    calls = max((1 << 28) // size, 4)

    def copy() -> Any:
        return target.copy_(source)

    def negate() -> Any:
        return torch.neg(source, out=target)

    def add() -> Any:
        return torch.add(source, target, out=target)

    def add_up() -> Any:
        return torch.sum(source, 0, out=total)

    def fill() -> Any:
        return target.fill_(1)

    return [
        ("copy_ on a stream", 2 * size, lambda: seconds_of(copy, "cuda")),
        ("copy_ in a graph", 2 * size, lambda: seconds_of_each(copy, calls)),
        ("neg on a stream", 2 * size, lambda: seconds_of(negate, "cuda")),
        ("neg in a graph", 2 * size, lambda: seconds_of_each(negate, calls)),
        ("add of two in a graph", 3 * size, lambda: seconds_of_each(add, calls)),
        ("sum in a graph", size, lambda: seconds_of_each(add_up, calls)),
        ("fill in a graph", size, lambda: seconds_of_each(fill, calls)),
    ]


__all__ = ("copy_rates",)
