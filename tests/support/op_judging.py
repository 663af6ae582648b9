"""What an op's right solution and a wrong one are told apart by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patcher.bench import Candidate, Evaluation, Language, Op, Outcome
from patcher.bench.judge.blob import read_set, strayed, write_set
from patcher.bench.judge.cases import Case, expect, make_inputs, tensors_of, value_problem
from patcher.bench.judge.judge import Judge


def wrong_with(op: Op, case: Case, kernel: Callable[..., Any]) -> str | None:
    """What the judge would say of one call of a kernel, on tensors placed as the case wants."""
    values = make_inputs(op, case, "cpu")
    inputs = {tensor.name: values[tensor.name] for tensor in op.contract.tensors}
    expected = expect(op, case, inputs)
    plan = tensors_of(op, case.point, case.placed, sparing=False)
    block = torch.empty(plan.set_bytes, dtype=torch.uint8)
    write_set(plan, block, inputs)
    kernel(*(slot.view(block) for slot in plan.slots), *case.scalars)
    if names := strayed(plan, block[None]):
        return f"writes around {', '.join(names)}"
    left: dict[str, Tensor] = read_set(plan, block, inputs)
    for tensor in op.contract.tensors:
        if tensor.access == "read":
            same = left[tensor.name].equal(inputs[tensor.name])
            assert same or inputs[tensor.name].isnan().any()
    return value_problem(op, [case], [expected], [left])


def tells_right_from_wrong(judge: Judge, name: str, right: str, change: tuple[str, str]) -> None:
    """The judge takes a PyTorch solution, and says "values" of it after a change of its text."""

    def judged(source: str) -> Evaluation:
        candidate = Candidate(op=name, language=Language.TORCH, source=source)
        return judge.evaluate(candidate, lambda *_: None)

    evaluation = judged(right)
    told = f"{evaluation.outcome}: {evaluation.failed_checks} {evaluation.log}"
    assert evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), told
    old, new = change
    assert old in right
    evaluation = judged(right.replace(old, new))
    assert evaluation.outcome is Outcome.MISMATCH, evaluation.log
    [failed] = [check for check in evaluation.checks if not check.passed]
    assert failed.name == "values"
