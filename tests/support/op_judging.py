"""What an op's right solution and a wrong one are told apart by."""

from __future__ import annotations

from patcher.bench import Candidate, Evaluation, Language, Outcome
from patcher.bench.judge.judge import Judge


def tells_right_from_wrong(judge: Judge, name: str, right: str, change: tuple[str, str]) -> None:
    """The judge takes a PyTorch solution, and says "values" of it after a change of its text."""

    def judged(source: str) -> Evaluation:
        candidate = Candidate(op=name, language=Language.TORCH, source=source)
        return judge.evaluate(candidate, lambda *_: None)

    evaluation = judged(right)
    assert evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), evaluation.log
    old, new = change
    assert old in right
    evaluation = judged(right.replace(old, new))
    assert evaluation.outcome is Outcome.MISMATCH, evaluation.log
    [failed] = [check for check in evaluation.checks if not check.passed]
    assert failed.name == "values"
