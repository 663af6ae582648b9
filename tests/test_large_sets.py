"""Input sets too large to be sent whole: how many there are, how they are made and checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import bench
from bench import Candidate, Evaluation, Language, Outcome
from bench.judge import JudgeSettings, cases, open_judge, stock
from bench.judge.cases import tensors_of
from bench.judge.judge import Judge

OP = bench.load_op("moe_matmul_down")
POINT = OP.sweep("cpu").points()[-1]
SERVED = OP.sweep("cuda").points()[-1]
SOURCE = next(c.source for i, c in OP.solutions() if i.language is Language.TORCH)
ENTRY = "    offsets = token_offsets.tolist()\n"
EACH = "numbers(weights[expert], scales[expert], bias.shape[1])"


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this machine's sizes travel as those of a GPU do."""
    monkeypatch.setattr(cases, "MIXED_BYTES", 1 << 10)
    monkeypatch.setattr(cases, "CHECKED_BYTES", 1 << 8)
    monkeypatch.setattr(stock, "PIECE_BYTES", 1000)


@pytest.fixture
def judge(small_is_large: None) -> Iterator[Judge]:
    settings = JudgeSettings(
        baseline="eager", pairs=3, points=1, threads=1, calls=60, lives_s=0.0, timeout_s=20
    )
    with open_judge(settings) as opened:
        yield opened


def judged(judge: Judge, source: str, language: Language = Language.TORCH) -> Evaluation:
    candidate = Candidate(op=OP.name, language=language, source=source)
    return judge.evaluate(candidate, lambda *_: None)


def altered(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


def test_the_right_one_is_right_and_hardly_anything_is_sent(judge: Judge) -> None:
    evaluation = judged(judge, SOURCE)
    assert evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), evaluation.failed_checks
    plan = tensors_of(OP, POINT)
    assert {slot.name: slot.travel for slot in plan.watched} == {
        **dict.fromkeys(("x", "scales", "bias"), "checked"),
        "weights": "mixed",
    }
    assert plan.returned_bytes < plan.sent_bytes < plan.set_bytes


CHANGED = ENTRY + "    weights.view(-1)[-1] += 1\n"
AROUND = ENTRY + "    weights.as_strided((1,), (1,), weights.storage_offset() - 1).fill_(0)\n"
PACKED_ONCE = """
made = {}
def kept(expert, weights, scales, columns):
    key = KEY
    if key not in made:
        made[key] = numbers(weights, scales, columns)
    return made[key]


def moe_matmul_down("""


@pytest.mark.parametrize(
    ("change", "outcome", "checks", "said"),
    [
        ((ENTRY, CHANGED), "guard_violation", {"guards"}, "changed weights"),
        ((ENTRY, AROUND), "guard_violation", {"guards"}, "weights.* around it"),
        ((ENTRY, CHANGED.replace("weights", "scales")), "guard_violation", {"guards"}, "scales"),
        (("weights.data_ptr()",), "mismatch", {"values", "determinism", "timed outputs"}, "output"),
        (
            ("(bytes(weights.view(-1)[::97].tolist()), bytes(scales.view(-1).tolist()))",),
            "mismatch",
            {"timed outputs", "values after"},
            "output",
        ),
    ],
    ids=["written", "around", "sent-written", "cached-by-address", "cached-by-a-sample"],
)
def test_a_cheat_with_large_weights_is_caught(
    judge: Judge, change: tuple[str, ...], outcome: str, checks: set[str], said: str
) -> None:
    if len(change) == 2:
        source = altered(*change)
    else:
        source = altered(EACH, f"kept(expert, {EACH.removeprefix('numbers(')}")
        source = source.replace("\ndef moe_matmul_down(", PACKED_ONCE.replace("KEY", change[0]))
    evaluation = judged(judge, source)
    assert evaluation.outcome == outcome, evaluation.log
    [failed] = evaluation.failed_checks
    assert failed.name in checks
    assert torch.jit.annotations is not None
    import re

    assert re.search(said, failed.detail)
