"""What a benchmark that starts the engine itself measured: batches, or many prompts at once.

It times no single requests: there is no TTFT, TPOT, ITL or goodput, and no wait for a token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from patcher.bench.ab.served import (
    LENGTH_TOLERANCE,
    ServedPoint,
    ServedRun,
    ServingTrace,
    TracePart,
)
from patcher.bench.errors import PatcherError

TOLD = (50, 90, 99)
"""Percentiles of a batch that reports tell; others may be there, too."""


def offline_run(
    kind: str, point: ServedPoint, trace: ServingTrace, found: Mapping[str, Any]
) -> ServedRun:
    """One run at a point, from the result of such a benchmark.

    Args:
        kind: a key of `READERS`.
        point: its concurrency is the number of prompts that are given at once.
        trace: its only part has the lengths of all prompts and answers, in tokens.

    Raises:
        KeyError, TypeError, ValueError, ArithmeticError: it is no such result.
        PatcherError: answers have other lengths than were asked for.
    """
    [part] = trace.parts
    return READERS[kind](point, part, found)


def latency_run(point: ServedPoint, part: TracePart, found: Mapping[str, Any]) -> ServedRun:
    """`vllm bench latency`: `latencies`, seconds of each iteration of one batch, `avg_latency`, and
    `percentiles` by number.
    """
    each = [float(one) for one in found["latencies"]]
    if min(each, default=0.0) <= 0:
        raise ValueError("a batch took no time")
    seconds, percentiles = statistics.fmean(each), dict(found["percentiles"])
    if missing := [key for key in TOLD if str(key) not in percentiles]:
        raise ValueError(f"no percentile {missing[0]}")
    if not math.isclose(seconds, float(found["avg_latency"]), rel_tol=1e-3):
        raise ValueError(f"batches took {seconds:g} s, and not avg_latency")
    prompts = point.concurrency * len(each)
    return ServedRun(
        point=point,
        requests=prompts,
        duration_s=sum(each),
        input_tokens=prompts * part.input_len,
        output_tokens=prompts * part.output_len,
        output_tokens_per_s=point.concurrency * part.output_len / seconds,
        total_tokens_per_s=point.concurrency * (part.input_len + part.output_len) / seconds,
        batch_ms={f"p{int(key)}": 1e3 * float(value) for key, value in percentiles.items()},
    )


def throughput_run(point: ServedPoint, part: TracePart, found: Mapping[str, Any]) -> ServedRun:
    """`vllm bench throughput`: `elapsed_time` in seconds, `num_requests` and `total_num_tokens`.

    It writes no number of output tokens. The end of a sequence is ignored, so it is what was asked
    for, and the total of both, which it counts, must agree.
    """
    seconds, prompts = float(found["elapsed_time"]), int(found["num_requests"])
    total, outputs = int(found["total_num_tokens"]), prompts * part.output_len
    asked = point.concurrency * (part.input_len + part.output_len)
    if prompts != point.concurrency or abs(total - asked) > LENGTH_TOLERANCE * asked:
        raise PatcherError(
            f"{prompts} prompts have {total:,} tokens with their answers at {point.label}, "
            f"where {point.concurrency} with {asked:,} were asked for"
        )
    return ServedRun(
        point=point,
        requests=prompts,
        duration_s=seconds,
        input_tokens=total - outputs,
        output_tokens=outputs,
        output_tokens_per_s=outputs / seconds,
        total_tokens_per_s=total / seconds,
    )


READERS: dict[str, Callable[[ServedPoint, TracePart, Mapping[str, Any]], ServedRun]] = {
    "latency": latency_run,
    "throughput": throughput_run,
}
"""How results are read, by what `OfflineBench.result` says."""
