"""What test_memory and others share."""

from __future__ import annotations

import math
import statistics

from patcher.bench import (
    Check,
    Environment,
    Evaluation,
    Outcome,
    Timing,
    load_op,
)
from patcher.memory import Experience

OP = load_op("fused_add_rms_norm")

SWEEP = OP.sweep("cuda")

GPU = Environment(
    device="NVIDIA H200", device_kind="cuda", capability="9.0", python="3.11", packages={}
)

HONEYTOKEN = "zqx_honey_9f8e7d6c"


def evaluated(
    number: int,
    said: float | Outcome | dict[int, float],
    *,
    check: str = "build",
    detail: str = "nvcc failed",
    log: str = "",
    environment: Environment | None = GPU,
) -> Evaluation:
    """A verdict: a speedup everywhere, one by swept size, or an outcome."""
    common = {
        "op": OP.name,
        "language": "cuda",
        "digest": f"{number:064x}",
        "environment": environment,
    }
    if isinstance(said, Outcome):
        failed = Check(name=check, passed=False, detail=detail)
        return Evaluation(**common, outcome=said, checks=(failed,), log=log)
    points = [point.axes for point in SWEEP.points()]
    each = {axes[SWEEP.axis]: said for axes in points} if isinstance(said, float) else said
    timings = tuple(
        Timing(
            axes=axes,
            candidate_us=10 / each[axes[SWEEP.axis]],
            baseline_us=10,
            speedup=each[axes[SWEEP.axis]],
            speedup_low=each[axes[SWEEP.axis]],
            speedup_high=each[axes[SWEEP.axis]],
            pairs=8,
            calls=8,
        )
        for axes in points
        if axes[SWEEP.axis] in each
    )
    overall = math.exp(statistics.fmean(math.log(timing.speedup) for timing in timings))
    return Evaluation(
        **common,
        outcome=Outcome.CORRECT if overall > 1 else Outcome.TOO_SLOW,
        baseline="vllm",
        sweep=SWEEP.name,
        timings=timings,
        geomean_speedup=overall,
    )


def broken(number: int, message: str, source: str = "", cause: str | None = None) -> Experience:
    log = f"unit.cu(7): error: {message}"
    evaluation = evaluated(number, Outcome.COMPILATION_FAILURE, log=log)
    return Experience(evaluation, source, cause=cause)
