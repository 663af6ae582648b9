"""Hardware counters for the analyst: a judge whose right verdicts carry them, where ncu works."""

from __future__ import annotations

from collections.abc import Callable

from patcher.bench import Candidate, Evaluation, MissingError, UsageError
from patcher.bench.machine.installed import find_ncu

CandidateJudge = Callable[[Candidate], Evaluation]
"""Says what one candidate is worth. A judge on another machine takes the candidate and raises
`WaitingError` until its verdict has come."""


def with_counters(
    judge: CandidateJudge, sweep: str | None, say: Callable[[str], None]
) -> CandidateJudge:
    """The judge, and after a right verdict on a GPU what Nsight Compute counts.

    Counters are evidence, not part of the verdict: where they cannot be read, that is said once
    and the loop goes on without.
    """
    missing = find_ncu() is None

    def judged(candidate: Candidate) -> Evaluation:
        nonlocal missing
        evaluation = judge(candidate)
        on_gpu = evaluation.environment and evaluation.environment.device_kind == "cuda"
        if missing or evaluation.counters or not on_gpu:
            return evaluation
        from patcher.bench.judge.counters import counted

        try:
            return counted(candidate, evaluation, sweep)
        except MissingError as error:
            missing = True
            say(f"no hardware counters: {error.message}")
        except UsageError as error:
            say(f"no hardware counters of this candidate: {error.message}")
        return evaluation

    return judged
