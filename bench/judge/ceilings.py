"""Measured ceilings of this machine: bandwidth, matmul rate and launch latency.

They define the speed of light. A time below what they allow is a guard violation, after they were
measured once more: a busy machine measures them too low. Results are cached by device and library
versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patcher.bench.machine.environment import device_name, fingerprint
from patcher.bench.ops.contract import Contract, Point
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.records import Record, remembered, write_atomically
from patcher.bench.toolchains import cache_root

METHOD = 4
"""Version of the measuring method; cached results of other versions are ignored."""
SLACK = 1.5
"""Factor by which a time may be below the floor, since ceilings are measurements too."""
MEASURED_BITS = 16
"""Width of the narrowest numbers whose matmul is measured. Half the width doubles the rate: fp8 and
fp4 on tensor cores, bytes with AVX-512 VNNI (on one thread of an AMD EPYC torch._int_mm gives 443
Gop/s, torch.mm 213 in bfloat16 and 101 in float32, for 1,024 rows)."""
NARROWEST_BITS = 4


class Ceilings(Record):
    """Ceilings of one device: the best of several measurements."""

    device: str
    """Name of the device."""
    memory_gb_s: float
    """Memory bandwidth in GB/s, bytes read plus written, on data far larger than the last-level
    cache: by a copy, on a GPU also by a sum."""
    cached_gb_s: float
    """Bandwidth in GB/s on data that fits a cache."""
    flops: dict[str, float]
    """Matmul rate in operations per second, by dtype of 16 bits or more."""
    launch_us: float
    """Time of the shortest kernel in a CUDA graph, in microseconds; 0 on a CPU."""

    def sol_us(self, contract: Contract, point: Point) -> float:
        """Speed of light in microseconds: the time of the contract's bytes and arithmetic.

        On a GPU the bytes come from memory. On a CPU they come from the cache, which holds them
        after the copy-in.
        """
        on_gpu = self.launch_us > 0
        moved = self._moved_us(contract, point, self.memory_gb_s if on_gpu else self.cached_gb_s)
        return max(moved, self._computed_us(contract, point))

    def sol_pct(self, contract: Contract, point: Point, call_us: float) -> float:
        """Speed of light in percent of a call's time.

        It is that of the bytes alone where another formula may do and did: the call took less time
        than the contract's arithmetic would.
        """
        if contract.cost.rewritable and call_us < self._computed_us(contract, point):
            cost = contract.cost.model_copy(update={"flops": "0"})
            contract = contract.model_copy(update={"cost": cost})
        return 100 * self.sol_us(contract, point) / call_us

    def launch_pct(self, call_us: float) -> float | None:
        """Launch floor in percent of a call's time; None on a CPU."""
        return 100 * self.launch_us / call_us if self.launch_us > 0 else None

    def floor_us(self, contract: Contract, point: Point) -> float:
        """Shortest possible time of a call in microseconds, even with all data in the cache."""
        fastest = max(self.cached_gb_s, self.memory_gb_s)
        least = self._moved_us(contract, point, fastest)
        if not contract.cost.rewritable:
            least = max(least, self._computed_us(contract, point))
        return max(least, self.launch_us) / SLACK

    def _computed_us(self, contract: Contract, point: Point) -> float:
        narrowest = min(DTYPES[name].bits for name in point.dtypes.values())
        bits = min(max(narrowest, NARROWEST_BITS), MEASURED_BITS)
        rate = max(self.flops.values()) * MEASURED_BITS / bits
        return contract.flops(point) / (rate * 1e-6)

    @staticmethod
    def _moved_us(contract: Contract, point: Point, gb_s: float) -> float:
        return contract.bytes_moved(point) / (gb_s * 1e3)


def ceilings(device: str, threads: int | None = None) -> Ceilings:
    """The ceilings of `cpu` or `cuda`, from the cache or measured now.

    Args:
        device: `cpu` or `cuda`.
        threads: CPU threads to measure with; None: torch's default.
    """
    return remembered(_cache(device, threads), Ceilings, lambda: _measured(device, threads))


def measured_again(device: str, threads: int | None = None) -> Ceilings:
    """The best of what is known and of what is measured now, which is remembered."""
    known, now = ceilings(device, threads), _measured(device, threads)
    best = Ceilings(
        device=now.device,
        memory_gb_s=max(known.memory_gb_s, now.memory_gb_s),
        cached_gb_s=max(known.cached_gb_s, now.cached_gb_s),
        flops={name: max(rate, known.flops.get(name, 0.0)) for name, rate in now.flops.items()},
        launch_us=min(known.launch_us, now.launch_us),
    )
    write_atomically(_cache(device, threads), best.model_dump_json())
    return best


def _cache(device: str, threads: int | None) -> Path:
    return cache_root() / "ceilings" / f"{METHOD}-{fingerprint(device, threads)}.json"


def remembered_ceilings(name: str) -> Ceilings | None:
    """The ceilings of a device of that name, if they were measured on this machine."""
    for path in sorted((cache_root() / "ceilings").glob(f"{METHOD}-*.json")):
        try:
            found = Ceilings.model_validate_json(path.read_bytes())
        except (OSError, ValueError):  # another process writes it
            continue
        if found.device == name:
            return found
    return None


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
    size = 8192 if device == "cuda" else 512
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        seconds = seconds_of(lambda: torch.mm(a, a, out=out), device)  # noqa: B023 (called at once)
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    return Ceilings(
        device=device_name(device),
        memory_gb_s=_moved(large, device),
        cached_gb_s=max(_moved(size, device) for size in small),
        flops=rates,
        launch_us=_launch_us() if device == "cuda" else 0.0,
    )


def _moved(size: int, device: str) -> float:
    """Best bandwidth in GB/s on `size` bytes.

    On a GPU the copy is an elementwise kernel: in a graph, `copy_` runs on a copy engine, which is
    slower than the multiprocessors (`bench/results/ceilings`).
    """
    import torch

    if device == "cpu":
        source = torch.ones(size, dtype=torch.uint8)
        target = torch.empty_like(source)
        return 2 * size / seconds_of(lambda: target.copy_(source), device) / 1e9
    source = torch.ones(size // 4, device=device)
    target, total = torch.empty_like(source), torch.empty((), device=device)
    calls = max((1 << 28) // size, 4)
    copied = seconds_of_each(lambda: torch.neg(source, out=target), calls)
    summed = seconds_of_each(lambda: torch.sum(source, 0, out=total), calls)
    return max(2 * size / copied, size / summed) / 1e9


def _launch_us() -> float:
    """Time in microseconds of a kernel on one element."""
    import torch

    one = torch.zeros(1, device="cuda")
    return seconds_of_each(lambda: one.add_(1), 200) * 1e6


def seconds_of_each(function: Callable[[], Any], calls: int) -> float:
    """Seconds per call in a CUDA graph of `calls` calls, independent of CPU launch overhead."""
    import torch

    function()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return seconds_of(graph.replay, "cuda") / calls


def seconds_of(function: Callable[[], Any], device: str) -> float:
    """Seconds per call: the best of 25 runs, each of at least 2 ms."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    calls, runs = 1, []
    while True:
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        elapsed = time.perf_counter() - begin
        if elapsed < 2e-3:
            calls *= 4
            continue
        runs.append(elapsed / calls)
        if len(runs) == 25:
            return min(runs)


__all__ = (
    *("SLACK", "Ceilings", "ceilings", "measured_again", "remembered_ceilings"),
    *("seconds_of", "seconds_of_each"),
)
