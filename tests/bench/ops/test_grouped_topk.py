"""grouped_topk: what decides, and which of several choices are right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from op_judging import wrong_with

from patcher import bench
from patcher.bench.judge.cases import Case
from patcher.bench.ops.contract import Point
from patcher.bench.runner.loading import load

OP = bench.load_op("grouped_topk")
SOURCE = OP.folder / "solutions" / "cpu_torch" / "grouped_topk.py"
KERNEL = load(str(SOURCE), "python", OP.name)
DTYPES = OP.sweep("cpu").dtypes


def inputs(
    row: list[float], bias: list[float] | None = None, groups: tuple[int, int] = (1, 1), **more: Any
) -> dict[str, Any]:
    """Of one token, with a sigmoid, two experts and renormalised weights unless said."""
    settings = (more.get("sigmoid", 1), more.get("renormalised", 1), *groups)
    return {
        "logits": torch.tensor([row], dtype=more.get("dtype", torch.float32)),
        "bias": torch.tensor(bias or []),
        "settings": torch.zeros(settings, dtype=torch.int32),
        "weights": torch.zeros(1, 2),
        "experts": torch.zeros(1, 2, dtype=torch.int32),
        "scaling": 2.5,
    }


def chosen(*given: Any, **more: Any) -> list[int]:
    """By the reference, with which the plain kernel agrees."""
    made = inputs(*given, **more)
    [found] = OP.reference(**made)["experts"].long().tolist()
    KERNEL(*made.values())
    assert made["experts"].tolist() == [found]
    return list(found)


def right(given: dict[str, Any], *choices: tuple[int, int]) -> list[bool]:
    written = [torch.tensor([choice], dtype=torch.int32) for choice in choices]
    found = [OP.derived(**given | {"experts": each})["experts"] for each in written]
    return [bool((one == other).all()) for one, other in zip(found, written, strict=True)]


def logit(score: float) -> float:
    return math.log(score / (1 - score))


@pytest.mark.parametrize("shape", OP.contract.hidden)
def test_it_routes_as_deepseek_does(shape: Any) -> None:
    """Token by token, expert by expert, without PyTorch."""
    axes = shape.axes
    point = Point(axes=axes, dtypes=DTYPES)
    given = OP.inputs.make(point, torch.Generator().manual_seed(3), "normal")
    found = OP.reference(**given, scaling=2.5)
    size = axes["n_experts"] // axes["groups"]
    for token, row in enumerate(given["logits"].tolist()):
        parts = [math.exp(each) for each in row]
        whole = [1 + part if axes["sigmoid"] else sum(parts) for part in parts]
        scores = [part / all_ for part, all_ in zip(parts, whole, strict=True)]
        added = given["bias"].tolist() or [0.0] * len(scores)
        values = [score + bias for score, bias in zip(scores, added, strict=True)]
        runs = [sorted(values[at : at + size])[::-1] for at in range(0, len(values), size)]
        of_groups = [sum(run[: 1 + axes["biased"]]) for run in runs]
        best = sorted(range(len(runs)), key=lambda group: -of_groups[group])[: axes["top_groups"]]
        allowed = [expert for expert in range(len(values)) if expert // size in best]
        picked = sorted(allowed, key=lambda expert: -values[expert])[: axes["top_k"]]
        total = sum(scores[each] for each in picked) if axes["renormalised"] else 1.0
        assert found["experts"][token].tolist() == picked
        weights = [2.5 * scores[each] / total for each in picked]
        assert found["weights"][token].tolist() == pytest.approx(weights, rel=1e-12)


def test_groups_are_chosen_first() -> None:
    row = [3.0, -3.0, 2.0, 1.9, 1.0, 0.9]
    # by the largest of a group; with a bias by the sum of two, here of equal ones
    assert chosen(row, None, (3, 1)) == chosen(row, None, (3, 1), sigmoid=0) == [0, 1]
    assert chosen(row, [0.0] * 6, (3, 1)) == [2, 3]
    assert chosen(row, None, (3, 2)) == [0, 2]


def test_scores_that_vanish_stay_nothing_where_their_sum_would_divide_them() -> None:
    assert OP.reference(**inputs([-1e3, -1e3]))["weights"].tolist() == [[0.0, 0.0]]


def test_of_equal_values_the_smaller_comes_first() -> None:
    assert chosen([-0.0, 0.0, -1.0]) == [0, 1]
    tied = inputs([1.0, 2.0, 2.0, 2.0])
    wrong = (1, 3), (2, 1), (2, 3), (1, 1), (1, -1), (1, 4), (1, 0)
    assert right(tied, (1, 2), *wrong) == [True, *[False] * len(wrong)]
    groups = inputs([1.0] * 4, [0.1] * 4, (2, 1))
    assert right(groups, (0, 1), (2, 3)) == [True, False]


def test_not_a_number_is_above_infinity() -> None:
    nan, inf = math.nan, math.inf
    assert chosen([inf, nan, 0.0, -inf]) == [1, 0]
    assert chosen([0.0, 0.0, 0.0], [nan, inf, 0.0]) == [0, 1]
    assert chosen([9.0, 9.0, 0.0, nan], [0.1] * 4, (2, 1)) == [3, 2]
    # a softmax that holds one is none anywhere
    assert chosen([0.0, 1.0, nan], sigmoid=0) == [0, 1]
    assert right(inputs([inf, nan, 0.0, -inf]), (1, 0), (0, 1)) == [True, False]


def test_between_values_that_rounding_may_swap_either_is_right() -> None:
    for gap, swaps in ((1e-8, True), (1e-5, False)):
        row = [logit(0.5), logit(0.5 + gap), logit(0.7), -5.0]
        near = inputs(row, dtype=torch.float64)
        assert right(near, (2, 1), (2, 0), (0, 2)) == [True, swaps, False]
        row = [logit(each) for each in (0.6, 0.5, 0.6 + gap, 0.5, 0.2, 0.1)]
        near = inputs(row, [1.0] * 6, (3, 1), dtype=torch.float64)
        assert right(near, (2, 3), (0, 1)) == [True, swaps]
        # never of two groups, nor of one that is surely not the best
        assert not any(right(near, (2, 0), (0, 3), (4, 5)))


ORDER = "torch.sort(values{}, dim=1, descending=True, stable=True).indices"
MASKED = ".masked_fill(out.repeat_interleave(size, 1), 0.0)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[:, :top_groups]", ""),
        ("min(2, size)", "1"),
        (ORDER.format(""), f"values.shape[1] - 1 - {ORDER.format('.flip(1)')}"),
        ("if renormalised", "if not renormalised"),
        (" if sigmoid else ", " if not sigmoid else "),
        ("picked * scaling", "picked"),
        ("1e-20", "1e-9"),
        (ORDER.format(""), f"{ORDER.format(MASKED)}; out = out & False"),
    ],
)
def test_a_kernel_that_errs_is_caught(old: str, new: str, tmp_path: Path) -> None:
    """It ignores groups, has the largest of each alone, the other order of ties, values of nothing
    for groups that are out, and so on."""
    source = SOURCE.read_text()
    assert old in source
    file = tmp_path / "grouped_topk.py"
    file.write_text(source.replace(old, new))
    wrong = load(str(file), "python", OP.name)
    cases = [
        Case(Point(axes=shape.axes | {"tokens": 16}, dtypes=DTYPES), regime, 5, (2.5,))
        for shape in OP.contract.hidden
        for regime in OP.inputs.REGIMES
    ]
    assert not any(wrong_with(OP, case, KERNEL) for case in cases)
    assert any(wrong_with(OP, case, wrong) for case in cases)
