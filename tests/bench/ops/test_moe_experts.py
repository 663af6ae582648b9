"""The experts of a mixture: kernels that are wrong in few calls, which the judge has to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_judging import wrong_with
from torch import Tensor

from patcher import bench
from patcher.bench.judge.cases import Case, Secrets, correctness_cases

OP = bench.load_op("moe_experts")
CASES = correctness_cases(OP, OP.sweep("cpu"), Secrets(1))
Kernel = Callable[..., Any]


def right(*given: Tensor) -> None:
    given[-1].copy_(OP.reference(*given)["output"])


def of_few_rows(most: int) -> Kernel:
    """It leaves the rows after the first few without experts, as one with fixed tiles may."""

    def kernel(*given: Tensor) -> None:
        *weights, ids, output = given
        ids = ids.clone()
        ids[most:] = -1
        right(*weights, ids, output)

    return kernel


def of_a_capacity(most: int) -> Kernel:
    """Of an expert's rows it computes the first few."""

    def kernel(*given: Tensor) -> None:
        *weights, ids, output = given
        ids = ids.clone()
        for expert in range(len(weights[2])):
            rows, choice = (ids == expert).nonzero(as_tuple=True)
            ids[rows[most:], choice[most:]] = -1
        right(*weights, ids, output)

    return kernel


def of_one_matmul(*given: Tensor) -> None:
    """It sums a token's rows by a matmul with zeros for all others: 0 * NaN is NaN."""
    right(*given)
    output = given[5]
    output.copy_(torch.eye(len(output)) @ output.float())


def without_nan(*given: Tensor) -> None:
    right(torch.nan_to_num(given[0], nan=0.0), *given[1:])


def said(kernel: Kernel, cases: list[Case]) -> list[str]:
    found = ((case.label(), wrong_with(OP, case, kernel)) for case in cases)
    return [f"{label}: {problem}" for label, problem in found if problem is not None]


def test_the_right_one_is_taken() -> None:
    assert said(right, CASES) == []


@pytest.mark.parametrize(
    "kernel",
    [of_few_rows(17), of_few_rows(63), of_a_capacity(17), of_a_capacity(32)],
    ids=["17 rows", "63 rows", "17 rows an expert", "32 rows an expert"],
)
def test_as_many_rows_as_the_guards_allow_are_tried(kernel: Kernel) -> None:
    assert said(kernel, [case for case in CASES if case.point.axes["tokens"] == 64])


@pytest.mark.parametrize("kernel", [of_one_matmul, without_nan])
def test_a_row_of_nan_is_nan_and_no_other_row_is(kernel: Kernel) -> None:
    assert said(kernel, [case for case in CASES if case.regime == "nan"])
