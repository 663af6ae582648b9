"""What tests of training share: replies and verdicts on them."""

from __future__ import annotations

from patcher.bench import Evaluation, Language, Outcome, Timing, geomean
from patcher.bench.judge.evaluation import KernelCounters
from patcher.judges.reward import RewardResult, reward
from patcher.training import EnvironmentOptions

OP = "silu_and_mul"
RIGHT = """import torch


def silu_and_mul(gate, up, output):
    output.copy_(torch.nn.functional.silu(gate.float()).mul_(up.float()))
"""
WRONG = RIGHT.replace("mul_", "add_")
OPTIONS = EnvironmentOptions(
    language=Language.TORCH, turns=3, against=("eager",), threads=1, pairs=2, points=1
)


def reply(source: str) -> str:
    return f"A design.\n\n```python\n{source}```\n"


def evaluation(baseline: str, low: float, *own: tuple[bool, float]) -> Evaluation:
    """A right candidate with this lower end of its speedup, and kernels of these durations."""
    timing = Timing(
        axes={"tokens": 1},
        candidate_us=1,
        baseline_us=low,
        speedup=low,
        speedup_low=low,
        speedup_high=low,
        pairs=6,
        calls=100,
    )
    counters = tuple(
        KernelCounters(
            kernel=f"k{n}",
            library=None if mine else "cuBLAS",
            grid="1",
            block="1",
            launches=2,
            duration_us=duration,
            values={},
        )
        for n, (mine, duration) in enumerate(own)
    )
    return Evaluation(
        op=OP,
        language="torch",
        digest="a" * 64,
        outcome=Outcome.CORRECT if low > 1 else Outcome.TOO_SLOW,
        baseline=baseline,
        timings=(timing,),
        geomean_speedup=geomean([low]),
        counters=counters,
    )


def judged(*found: Evaluation) -> RewardResult:
    return RewardResult(
        reward=reward(list(found)), evaluations={str(each.baseline): each for each in found}
    )
