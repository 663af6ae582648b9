"""Traces that are kept, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patcher.bench import UsageError
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench import tracing
from patcher.integrate.kernelbench.problem import Problem

PROBLEM = """import os
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(SIZE)]
def get_init_inputs():
    return []
"""


def problem(source: str) -> Problem:
    return Problem(name="level1_1", file="1.py", source=source, changed={})


def unable(*_: object) -> tuple[int, str]:
    raise UsageError("it is traced again", "")


def test_a_trace_is_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path))
    first = tracing.trace(problem(PROBLEM.replace("SIZE", "64, 8")))
    [kept] = (tmp_path / "traces").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "run_compiler", unable)
        assert tracing.trace(problem(PROBLEM.replace("SIZE", "64, 8"))) == first
        with pytest.raises(UsageError, match="again"):
            tracing.trace(problem(PROBLEM.replace("SIZE", "64, 9")))
        for damage in ("", "{", '{"refused": "no"}', json.dumps({"steps": []})):
            kept.write_text(damage)
            with pytest.raises(UsageError, match="again"):
                tracing.trace(problem(PROBLEM.replace("SIZE", "64, 8")))
    assert tracing.trace(problem(PROBLEM.replace("SIZE", "64, 8"))) == first
    assert json.loads(kept.read_text())["steps"]


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ("1 << 34", "allocate memory.*--scale 16, or --size NAME=SIZE"),
        ("0, 8", "its input x is empty"),
        (
            "os.open('couldn\\'t connect to https://huggingface.co ' "
            "+ os.environ['HF_HUB_OFFLINE'], 0)",
            "huggingface.co 1.*no cache of Hugging Face; .*from_config",
        ),
    ],
)
def test_a_refusal_names_the_way_out_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: str, reason: str
) -> None:
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path))
    with pytest.raises(Refused, match=reason):
        tracing.trace(problem(PROBLEM.replace("SIZE", inputs)))
    assert not (tmp_path / "traces").exists()
