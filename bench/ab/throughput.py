"""End-to-end A/B: windows of decode with the patch on and off, interleaved in one process.

Both windows of a pair decode the same prompts and take turns, a few steps at a time in ABBA order.
So neither the prompts nor drift within a second favours an arm. The arm that begins is random.
Every pair has its own prompts, and every third pair is followed by an A/A pair: the baseline on
both sides.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from patcher.bench.ab.latency import in_steps, latency_of
from patcher.bench.ab.phases import ABPhase, ABProgress, silent
from patcher.bench.ab.records import Latency, Throughput
from patcher.bench.ab.window_clocks import unfit
from patcher.bench.ab.windows import (
    Arms,
    LocalSide,
    Pair,
    PairKind,
    Side,
    abba,
    prompt_seed,
    take_pair,
)
from patcher.bench.engines import Engine
from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe
from patcher.bench.stats.compare import compare
from patcher.bench.stats.comparison import Arm, Comparison, Window
from patcher.bench.stats.intervals import Look, first_decided, schedule
from patcher.bench.workload import Workload

CONTROL_EVERY = 3
"""Number of A/B pairs per A/A pair."""
LATENCY_WINDOWS = 2
"""Steps timed one by one for each arm, after the pairs."""


def compare_in_one_process(
    engine: Engine,
    arms: Arms,
    workload: Workload,
    *,
    margin_pct: float,
    max_pairs: int,
    looks: int,
    patch_id: str | None,
    clocks: ClockMonitor,
    seed: int = 0,
    progress: ABProgress = silent,
    kernel_calls: Callable[[], int] | None = None,
    untimed: Arms | None = None,
) -> Throughput:
    """Measure until a look decides or `max_pairs` pairs are taken.

    Args:
        untimed: the arms for calls outside of windows, so that these are counted separately.
        kernel_calls: the number of calls of the patched kernel until now, to count them by window.

    Raises:
        UsageError: a window is too short to time.
        PatcherError: the engine gave unexpected tokens, or no pair was usable.
    """
    check_window(workload)
    rng = random.Random(seed)
    control_orders = _orders(random.Random(f"control {seed}"))
    planned = schedule(max_pairs, looks)
    windows: list[Window] = []
    warm_up(engine, untimed or arms, workload, seed)
    pair = taken = 0

    def take(kind: PairKind, order: tuple[Arm, Arm]) -> None:
        nonlocal pair
        sides: dict[Arm, Side] = {
            arm: LocalSide(engine, arms["baseline" if kind == "aa" else arm], kernel_calls)
            for arm in order
        }
        one = Pair(pair, kind, order)
        windows.extend(take_pair(one, sides, workload, engine.vocab_size, seed, clocks))
        pair += 1

    def at(look: Look) -> Comparison | None:
        nonlocal taken
        while taken < look.taken:
            for order in abba(rng):
                take("ab", order)
                taken += 1
                if taken % CONTROL_EVERY == 0:
                    take("aa", next(control_orders))
                said = f"A/B pairs{so_far(windows)}"
                progress(ABPhase.PAIRS, said, taken, planned[-1].taken)
        return compare_windows(windows, "ab", margin_pct, look.confidence_pct)

    comparison = first_decided(planned, at)
    if comparison is None:
        raise unusable(taken, clocks)
    return Throughput(
        workload=workload,
        patch=patch_id,
        comparison=comparison,
        control=compare_windows(windows, "aa", margin_pct, 95.0),
        windows=tuple(windows),
        routing_entropy_pct=engine.routing_entropy_pct(engine.prompts(seed), 16),
        clocks=clocks.description,
        environment=describe(workload.device, torch.get_num_threads(), clocks.description),
        latency=_latencies(engine, untimed or arms, windows, prompt_seed(seed, pair)),
    )


def _orders(rng: random.Random) -> Iterator[tuple[Arm, Arm]]:
    """ABBA orders without end. The control has its own sequence: with the orders of the A/B pairs,
    four A/A pairs in a row could begin with the same arm, and the order effect would look like a
    gain.
    """
    while True:
        yield from abba(rng)


def _latencies(engine: Engine, arms: Arms, windows: list[Window], seed: int) -> dict[Arm, Latency]:
    found = {}
    for arm, enter in arms.items():
        with enter():
            steps = [in_steps(engine, seed + index) for index in range(LATENCY_WINDOWS)]
        every = [step for one in steps for step in one]
        found[arm] = latency_of(arm, windows, every, engine.workload.batch)
    return found


def of_processes(
    workload: Workload,
    patch_id: str | None,
    comparison: Comparison,
    windows: Sequence[Window],
    steps: Mapping[Arm, Sequence[float]],
    peak: Mapping[Arm, Sequence[int]],
    residency: str,
    margin_pct: float,
    clocks: ClockMonitor,
) -> Throughput:
    """The throughput from windows of arms in separate processes.

    Args:
        steps: step times in seconds of each arm, see `patcher.bench.ab.latency.in_steps`.
        peak: peak memory in bytes of each arm's processes. The median counts, since the first
            process of its kind on a machine compiles and takes memory for that.
    """
    threads = workload.threads or torch.get_num_threads()
    return Throughput(
        workload=workload,
        patch=patch_id,
        comparison=comparison,
        control=compare_windows(list(windows), "aa", margin_pct, 95.0),
        windows=tuple(windows),
        routing_entropy_pct=None,
        clocks=clocks.description,
        environment=describe(workload.device, threads, clocks.description),
        latency={
            arm: latency_of(arm, windows, every, workload.batch) for arm, every in steps.items()
        },
        peak_memory_bytes={arm: statistics.median_low(every) for arm, every in peak.items()},
        residency=residency,
    )


def check_window(workload: Workload) -> None:
    """Check the length of a window.

    Raises:
        UsageError: it is too short to time.
    """
    if workload.output_len < 2:
        raise UsageError(
            "a window of 1 decode step leaves nothing to time", "use 2 decode steps or more"
        )


def unusable(pairs: int, clocks: ClockMonitor) -> PatcherError:
    """The error if no pair is usable."""
    return PatcherError(
        f"none of {pairs} pairs is usable: their clocks drifted or throttled "
        f"({clocks.description})",
        "let the GPU cool, stop what else runs on it, or lock its clocks lower",
    )


def so_far(windows: list[Window]) -> str:
    """The interval until now, as a note for progress; it is not a look and decides nothing."""
    found = compare_windows(windows, "ab", 0.0, 95.0)
    if found is None or found.pairs < 3:
        return ""
    return f" ({found.figures})"


def warm_up(engine: Engine, arms: Arms, workload: Workload, seed: int) -> None:
    """Run both arms once, untimed, so that lazy set-up counts for neither."""
    for enter in arms.values():
        with enter():
            engine.generate(engine.prompts(seed), min(workload.output_len, 8))


def compare_windows(
    windows: list[Window], kind: PairKind, margin_pct: float, confidence_pct: float
) -> Comparison | None:
    """Compare the windows of one kind, without pairs whose clocks drifted or throttled.

    None if no pair is left.
    """
    chosen = [window for window in windows if window.kind == kind]
    # in one process the A/A pairs come after A/B pairs, so they need no warm-up
    cold = kind == "ab" or any(window.process is not None for window in chosen)
    warmup, drop = int(cold), unfit_pairs(windows)
    left: dict[int | None, list[int]] = {}
    for window in chosen:
        left.setdefault(window.process, []).append(window.pair)
    if all(set(list(dict.fromkeys(pairs))[warmup:]) <= drop for pairs in left.values()):
        return None
    return compare(chosen, margin_pct, confidence_pct, warmup, drop)


def unfit_pairs(windows: list[Window]) -> frozenset[int]:
    """Pairs that their clocks make unusable, see `patcher.bench.ab.window_clocks.unfit`."""
    return frozenset(unfit(windows))
