"""What this machine can do at best, measured: copies, matmuls, the shortest kernel.

A share of the speed of light is against these; a time below what they allow is a violation. Kept
for a machine in the cache, by device and library versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.contract import Contract, Point
from bench.environment import device_name, fingerprint
from bench.records import Record, remembered
from bench.toolchains import cache_root

METHOD = 2
"""Of measuring; what another one found is not taken for it."""
SLACK = 1.5
"""A measured time may be this much below the floor: ceilings are measured, too."""


class Ceilings(Record):
    """Of one device, at its best moment; bytes are counted as read plus written."""

    device: str
    memory_gb_s: float
    """A copy far larger than the last-level cache."""
    cached_gb_s: float
    """The fastest of copies that stay in a cache."""
    flops: dict[str, float]
    """Matmul by dtype, operations per second."""
    launch_us: float
    """The shortest kernel in a CUDA graph; 0 on a CPU."""

    def light_us(self, contract: Contract, point: Point) -> float:
        """Time that the contract's bytes and arithmetic take at these rates: bytes from memory on a
        GPU, from the cache on a CPU, where they lie after the copy-in.
        """
        on_gpu = self.launch_us > 0
        return self._us(contract, point, self.memory_gb_s if on_gpu else self.cached_gb_s)

    def launch_pct(self, call_us: float) -> float | None:
        """Share of the launch floor that a call of so many microseconds is at; None on a CPU."""
        return 100 * self.launch_us / call_us if self.launch_us > 0 else None

    def floor_us(self, contract: Contract, point: Point) -> float:
        """No call on this machine takes less, even with all of its data in the cache."""
        fastest = max(self.cached_gb_s, self.memory_gb_s)
        return max(self._us(contract, point, fastest), self.launch_us) / SLACK

    def _us(self, contract: Contract, point: Point, gb_s: float) -> float:
        moved = contract.bytes_moved(point) / (gb_s * 1e3)
        best = max(self.flops.values())
        return max(moved, contract.flops(point) / (best * 1e-6))


def ceilings(device: str, threads: int | None = None) -> Ceilings:
    """Measured now, or found in the cache."""
    path = cache_root() / "ceilings" / f"{METHOD}-{fingerprint(device, threads)}.json"
    return remembered(path, Ceilings, lambda: _measured(device, threads))


def _measured(device: str, threads: int | None) -> Ceilings:
    import torch

    before = torch.get_num_threads()
    if device == "cpu" and threads is not None:
        torch.set_num_threads(threads)
    try:
        return _best(device)
    finally:
        torch.set_num_threads(before)


def _best(device: str) -> Ceilings:
    import torch

    large = 1 << 30 if device == "cuda" else 1 << 28
    small = (
        (1 << 21, 1 << 22, 1 << 23) if device == "cuda" else (1 << 13, 1 << 15, 1 << 17, 1 << 20)
    )
    dtypes = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32,)
    size = 8192 if device == "cuda" else 1024
    rates = {}
    for dtype in dtypes:
        a = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        seconds = _seconds(lambda: torch.mm(a, a, out=out), device)  # noqa: B023 (called at once)
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    return Ceilings(
        device=device_name(device),
        memory_gb_s=_copied(large, device),
        cached_gb_s=max(_copied(size, device) for size in small),
        flops=rates,
        launch_us=_launch_us() if device == "cuda" else 0.0,
    )


def _copied(size: int, device: str) -> float:
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device == "cuda":
        seconds = _seconds_of_each(lambda: target.copy_(source), max((1 << 28) // size, 1))
    else:
        seconds = _seconds(lambda: target.copy_(source), device)
    return 2 * size / seconds / 1e9


def _launch_us() -> float:
    """A kernel on one element."""
    import torch

    one = torch.zeros(1, device="cuda")
    return _seconds_of_each(lambda: one.add_(1), 200) * 1e6


def _seconds_of_each(function: Callable[[], Any], calls: int) -> float:
    """From a CUDA graph of so many calls: how fast this machine's processors launch them, which
    may be busy, does not tell.
    """
    import torch

    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return _seconds(graph.replay, "cuda") / calls


def _seconds(function: Callable[[], Any], device: str) -> float:
    """The best of a few, each over enough calls to be told from the clock."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    calls, best = 1, []
    while True:
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        took = time.perf_counter() - begin
        if took < 2e-3:
            calls *= 4
            continue
        best.append(took / calls)
        if len(best) == 25:
            return min(best)


__all__ = ("SLACK", "Ceilings", "ceilings")
