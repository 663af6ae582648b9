"""A kernel in Python is loaded twice into one process, the second time where foreign code ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.bench import Candidate, Evaluation, Language, Outcome, load_op
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.zygote import placed
from patcher.bench.toolchains import build

NORM = load_op("fused_add_rms_norm")
FIRST = """
import builtins

import torch

again = hasattr(builtins, "loaded")
builtins.loaded = True
"""
BODY = """
def fused_add_rms_norm(input, residual, weight, epsilon):
    total = input.float() + residual.float()
    residual.copy_(total)
    total = total.double() if {other} else total
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    input.copy_(total * scale * weight)
"""


def judged(source: str, seed: int | None = None) -> Evaluation:
    candidate = Candidate(op=NORM.name, language=Language.TORCH, source=source)
    settings = JudgeSettings(device="cpu", points=1, pairs=3, calls=10, lives_s=0)
    with open_judge(settings) as judge:
        return judge.evaluate(candidate, lambda *_: None, seed)


def test_a_build_is_placed_once_and_never_through_a_link(tmp_path: Path) -> None:
    built = build(
        Candidate(op=NORM.name, language=Language.TORCH, source=FIRST + BODY), NORM.contract
    )
    assert built.path is not None
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    (folder / built.path.name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        placed(built, folder)
    assert victim.read_text() == "precious"


def test_other_bits_are_checked_and_leave_the_digest_of_outputs() -> None:
    same, other = (judged(FIRST + BODY.format(other=each), seed=1) for each in ("0", "again"))
    assert same.outputs_sha256 == other.outputs_sha256
    said = {each.name: each.detail for each in other.checks}["loaded again"]
    assert "right at" in said
    assert "with other bits at" in said
    assert other.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)


@pytest.mark.parametrize(
    "more",
    [
        'torch.library.define("reloading::op", "(Tensor x) -> Tensor")\n',
        'if again:\n    raise ImportError("once")\n',
    ],
)
def test_what_loads_once_is_told_why(more: str) -> None:
    found = judged(FIRST + more + BODY.format(other="0"))
    assert found.outcome is Outcome.RUNTIME_ERROR
    [failed] = [each for each in found.checks if not each.passed]
    assert failed.name == "loaded again"
    assert "it was right as first loaded into a fresh process" in failed.detail


def test_what_runs_once_is_told_of_its_second_load() -> None:
    body = BODY.format(other="1 // (not again)")
    [failed] = [each for each in judged(FIRST + body).checks if not each.passed]
    assert failed.name == "loaded again"
    assert "ZeroDivisionError" in failed.detail
    assert "loaded into a fresh process" in failed.detail
