"""`make bench`: measure patcher's own speed, and its verdicts on synthetic noise.

Speeds are ratios of interleaved runs with their spread. Each benchmark is one function, and none
asserts a time.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from patcher.bench import Candidate, Language, load_op
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.judge import Judge
from patcher.bench.lab.copy_rates import copy_rates
from patcher.bench.lab.judging_bytes import judging_bytes
from patcher.bench.lab.reading import reading_time
from patcher.bench.lab.simulation import statistics_table
from patcher.bench.toolchains import build

TORCH_STYLE = """
#include <torch/extension.h>
void fused_add_rms_norm(torch::Tensor input, torch::Tensor residual, torch::Tensor weight,
                        double epsilon) {
  residual.add_(input);
  auto scale = torch::rsqrt(residual.pow(2).mean(-1, true) + epsilon);
  input.copy_(residual * scale * weight);
}
"""


def binding_build_time() -> None:
    """Print the build time with PyTorch's headers relative to that with tvm-ffi."""
    op = load_op("fused_add_rms_norm")
    ffi = next(candidate for info, candidate in op.solutions() if info.name == "cpu_simd")
    torch_style = Candidate(op=op.name, language=ffi.language, source=TORCH_STYLE)
    build(torch_style, op.contract)  # builds the precompiled headers before timing

    def seconds(candidate: Candidate) -> float:
        with tempfile.TemporaryDirectory() as scratch:
            begin = time.perf_counter()
            build(candidate, op.contract, Path(scratch))
            return time.perf_counter() - begin

    compare("build: PyTorch headers / tvm-ffi", lambda: seconds(torch_style), lambda: seconds(ffi))


def judging_time() -> None:
    """Print the time of each stage of an evaluation, for each language that runs here.

    The first evaluation of a judge also starts the trusted processes; two more follow.
    """
    op = load_op("fused_add_rms_norm")
    for info, candidate in op.solutions():
        if info.language is not Language.CPP and not torch.cuda.is_available():
            continue
        with open_judge(JudgeSettings(threads=1)) as judge:
            for turn in ("first", "second", "third"):
                _judge_once(judge, candidate, f"judge {info.name}, {turn}")


def _judge_once(judge: Judge, candidate: Candidate, name: str) -> None:
    begin = time.perf_counter()
    stages: dict[str, float] = {}

    def progress(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, time.perf_counter() - begin)

    judge.evaluate(candidate, progress)
    whole = time.perf_counter() - begin
    ends = [*list(stages.values())[1:], whole]
    for (stage, start), end in zip(stages.items(), ends, strict=True):
        print(f"{name}: {stage:10s} {end - start:6.2f} s of {whole:.2f} s", flush=True)


def compare(name: str, first: Callable[[], float], second: Callable[[], float]) -> None:
    """Print the ratio first / second over interleaved pairs."""
    ratios = [math.log(first() / second()) for _ in range(4)]
    mean, spread = statistics.fmean(ratios), statistics.stdev(ratios)
    print(f"{name}: {math.exp(mean):.2f} (pair SD {100 * spread:.0f} %, {len(ratios)} pairs)")


BENCHMARKS = {
    "build": binding_build_time,
    "judge": judging_time,
    "bytes": judging_bytes,
    "copies": copy_rates,
    "reading": reading_time,
    "statistics": statistics_table,
}


def main() -> None:
    chosen = sys.argv[1:] or list(BENCHMARKS)
    for name in chosen:
        if name not in BENCHMARKS:
            sys.exit(f"unknown benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
