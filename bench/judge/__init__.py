"""Is a candidate right, and is it faster? `evaluate` builds it, runs it in another process and
says so.

Three processes: the build (compilers only), the runner (the candidate, no expected values), and
the judge, which never loads the candidate and reads plain bytes and JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.candidate import Candidate
from bench.evaluation import Evaluation

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass(frozen=True)
class JudgeSettings:
    device: str | None = None
    """`cpu` or `cuda`; None: a C++ candidate on the CPU, else CUDA where there is one."""
    sweep: str | None = None
    baseline: str | None = None
    """Compare with this one instead of the strongest that runs."""
    pairs: int = 12
    """Pairs of timed blocks a point, after one that is thrown away."""
    timeout_s: float = 30.0
    """The longest one command to the candidate's process may take."""
    load_timeout_s: float = 180.0
    """Likewise for loading and the first calls (just-in-time compilers)."""
    threads: int | None = None


def evaluate(
    candidate: Candidate, settings: JudgeSettings | None = None, progress: Progress | None = None
) -> Evaluation:
    """Judge one candidate. A crash, a hang or an exit of it is an outcome, not an exception.

    Raises:
        UsageError: unknown op, sweep or baseline.
        MissingError: no compiler or no device for its language here.
    """
    # imported late: the runner process imports this package and wants none of the judge
    from bench.judge.judge import judge

    return judge(
        candidate, settings or JudgeSettings(), progress or (lambda stage, done, total: None)
    )


__all__ = ["JudgeSettings", "Progress", "evaluate"]
