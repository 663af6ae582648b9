"""A module in another formula, which is as right: what infinities give there, and what NaN must.

inf - inf has no value, so a sum over a product's columns that needs no product gives an infinity
where the product's has both signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patcher.bench.judge.cases import Case, Expected, Secrets, expect, make_inputs, value_problem
from patcher.bench.ops.op import Op
from patcher.integrate import import_kernel

PROBLEM = """import torch
import torch.nn as nn

batch_size = 64
inside = 32
outside = 48


class Model(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x):
        x = torch.sum(self.linear(x), dim=1, keepdim=True)
        return LAST


def get_inputs():
    return [torch.rand(batch_size, inside)]


def get_init_inputs():
    return [inside, outside]
"""
ATTENTION = """import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


def get_inputs():
    return [torch.rand(4, 2, 4, 8) for _ in range(3)]


def get_init_inputs():
    return []
"""
SEEDS = 20
Formula = Callable[..., Tensor]


def made(folder: Path, text: str) -> Op:
    problem = folder / "level2" / "7_Problem.py"
    problem.parent.mkdir()
    problem.write_text(text)
    import_kernel(problem, folder / "ops")
    return Op(folder / "ops" / "level2_7_problem")


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> Op:
    return made(tmp_path_factory.mktemp("summed"), PROBLEM.replace("LAST", "x"))


def swapped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x @ weight.sum(0) + bias.sum())[:, None]


def problems(op: Op, regime: str, formula: Formula, only: str = "") -> list[str]:
    """What the judge says of a formula's results, of those seeds where it says something."""
    point, draw = op.sweep("cpu").points()[-1], Secrets(5)
    said = []
    for _ in range(SEEDS):
        case = Case(point, regime, draw.seed(), (), only=only)
        given = make_inputs(op, case, "cpu")
        expected: Expected = expect(op, case, given)
        read = [given[each.name] for each in op.contract.tensors if each.access == "read"]
        found: dict[str, Any] = {"output": formula(*read)}
        said.append(value_problem(op, [case], [expected], [found]))
    return [each for each in said if each]


@pytest.mark.parametrize("only", ["x", "linear_weight", "linear_bias", ""])
def test_infinities_cancel_in_one_formula_and_not_in_another(summed: Op, only: str) -> None:
    assert problems(summed, "inf", swapped, only) == []
    assert problems(summed, "nan", swapped, only) == []


def test_an_infinity_may_be_a_nan(summed: Op) -> None:
    """As in a sum over all rows but one, made by taking that one away."""

    def away(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return swapped(x, weight, bias) + x[:, :1] - x[:, :1]

    assert problems(summed, "inf", away) == []


def test_a_nan_of_infinities_may_be_a_number(tmp_path: Path) -> None:
    """A bounded function of an infinity is a number."""
    op = made(tmp_path, PROBLEM.replace("LAST", "torch.sigmoid(x)"))
    assert problems(op, "inf", lambda *given: torch.sigmoid(swapped(*given)), "x") == []


@pytest.mark.parametrize(
    ("regime", "wrong"),
    [
        ("nan", lambda *given: swapped(*given).nan_to_num()),
        ("nan", lambda *given: torch.where(swapped(*given).isnan(), torch.inf, swapped(*given))),
        ("inf", lambda *given: swapped(*given) * torch.nan),  # numbers stay numbers
        ("inf", lambda x, *more: swapped(x.nan_to_num(posinf=0, neginf=0), *more) + 1),
        ("normal", lambda *given: swapped(*given) * torch.nan),
        ("large", lambda *given: swapped(*given) * torch.inf),
    ],
)
def test_a_planted_nan_stays_one_and_numbers_are_checked(
    summed: Op, regime: str, wrong: Formula
) -> None:
    assert len(problems(summed, regime, wrong, "x" if regime in ("nan", "inf") else "")) == SEEDS


def test_a_formula_that_stands_gives_infinities_where_it_does(summed: Op) -> None:
    """Without leave to rewrite, as an op of the library is."""
    cost = summed.contract.cost.model_copy(update={"rewritable": False})
    strict = Op(summed.folder)
    strict.contract = summed.contract.model_copy(update={"cost": cost})
    assert any("non-finite" in each for each in problems(strict, "inf", swapped, "x"))


def test_attention_is_right_by_its_formula_and_by_the_library(tmp_path: Path) -> None:
    """On a CPU the library's fused kernel has zeros for a query with a NaN and few keys."""
    op = made(tmp_path, ATTENTION)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v

    for right in (formula, torch.nn.functional.scaled_dot_product_attention):
        assert problems(op, "nan", right, "q") == []
        assert problems(op, "normal", right) == []
    assert problems(op, "nan", lambda q, k, v: formula(q.nan_to_num(), k, v), "q")
