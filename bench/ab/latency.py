"""Latency of a request: time to first token, time per token, and inter-token latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from patcher.bench.ab.records import Latency
from patcher.bench.ab.windows import no_gc
from patcher.bench.stats.comparison import Arm, Window

if TYPE_CHECKING:
    from patcher.bench.engines import Decoder

PERCENTILES = (50, 90, 99)


def in_steps(engine: Decoder, seed: int) -> list[float]:
    """Seconds of each decode step of one window but the first, with a wait after each.

    An engine may run ahead of its client in an A/B window, so these come from a separate window.
    """
    steps: list[float] = []
    decoding = engine.prefill(engine.prompts(seed))
    with no_gc():
        engine.decode(decoding, 1)
        for _ in range(engine.workload.output_len - 1):
            begin = time.perf_counter()
            engine.decode(decoding, 1)
            steps.append(time.perf_counter() - begin)
    engine.release(decoding)
    return steps


def latency_of(arm: Arm, windows: Iterable[Window], steps: Sequence[float], batch: int) -> Latency:
    """Latency from an arm's A/B windows, and from steps of `in_steps`; at least one of each."""
    own = [window for window in windows if window.kind == "ab" and window.arm == arm]
    ordered = sorted(steps)
    between = {f"p{each}": 1e3 * percentile(ordered, each) for each in PERCENTILES}
    return Latency(
        first_token_ms=1e3 * statistics.median(window.prefill_s for window in own),
        per_token_ms=1e3 * statistics.median(window.step_s(batch) for window in own),
        steps=len(ordered),
        between_ms={**between, "max": 1e3 * ordered[-1]},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank: the smallest value that so many percent do not exceed."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank) - 1, 0)]
