"""Which choices among logits that nearly tie are right, and which the judge tells as wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from op_judging import wrong_with
from torch import Tensor

from patcher import bench
from patcher.bench.judge.cases import Case
from patcher.bench.judge.regimes import regimes_of
from patcher.bench.ops.contract import Point

OP = bench.load_op("lm_head_argmax")
SIZES = {"tokens": 17, "hidden": 512, "vocab": 3001}
POINTS = [Point(axes=SIZES, dtypes=dtypes) for dtypes in OP.contract.dtype_choices()]
Choice = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrong(choose: Choice, point: Point, regime: str) -> str | None:
    def kernel(x: Tensor, weight: Tensor, output: Tensor) -> None:
        output.copy_(choose(x, weight))

    return wrong_with(OP, Case(point, regime, 7, ()), kernel)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().T


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Sums of another order: of an eighth each, from the last to the first."""
    parts = zip(reversed(x.float().chunk(8, 1)), reversed(weight.float().chunk(8, 1)), strict=True)
    total = torch.zeros(len(x), len(weight))
    for left, right in parts:
        total += left @ right.T
    return total.argmax(1)


RIGHT: dict[str, Choice] = {
    "unrounded": lambda x, weight: logits(x, weight).argmax(1),
    "another order": in_parts,
    "rounded to T, as an engine writes them": lambda x, weight: (x @ weight.T).argmax(1),
    "one by one": lambda x, weight: torch.stack([weight.float() @ r for r in x.float()]).argmax(1),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.dtypes["T"])
def test_sums_of_any_order_may_choose_rounded_or_not(name: str, point: Point) -> None:
    for regime in regimes_of(OP):
        assert wrong(RIGHT[name], point, regime) is None, regime


def last_of_equal(values: Tensor) -> Tensor:
    return values.shape[1] - 1 - values.flip(1).argmax(1)


def near_tie(x: Tensor, weight: Tensor) -> Tensor:
    """The second best, where less than a unit of T's last place is between."""
    top = logits(x, weight).topk(2, 1)
    gap = top.values[:, 0] - top.values[:, 1]
    near = gap < torch.finfo(x.dtype).eps * top.values[:, 0].abs()
    return torch.where(near, top.indices[:, 1], top.indices[:, 0])


def without_the_last(x: Tensor, weight: Tensor) -> Tensor:
    return logits(x, weight)[:, :-1].argmax(1)


def from_zero(x: Tensor, weight: Tensor) -> Tensor:
    found = logits(x, weight).max(1)
    return torch.where(found.values > 0, found.indices, 0)


def nan_below(x: Tensor, weight: Tensor) -> Tensor:
    return logits(x, weight).nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(1)


def narrower(x: Tensor, weight: Tensor) -> Tensor:
    """Logits in the 8 bits of bfloat16, or of one dtype below it."""
    kind = torch.float8_e4m3fn if x.dtype == torch.bfloat16 else torch.bfloat16
    return logits(x, weight).to(kind).float().argmax(1)


WRONG: dict[str, tuple[str, Choice]] = {
    "the first token": ("normal", lambda x, weight: torch.zeros(len(x))),
    "the last token": ("normal", lambda x, weight: torch.full((len(x),), len(weight) - 1)),
    "no token": ("zeros", lambda x, weight: torch.full((len(x),), -1)),
    "past the vocabulary": ("nan", lambda x, weight: torch.full((len(x),), len(weight))),
    "the last of equal ones": ("tied", lambda x, weight: last_of_equal(logits(x, weight))),
    "the last of all zeros": ("zeros", lambda x, weight: last_of_equal(logits(x, weight))),
    "no tail": ("ends", without_the_last),
    "a maximum from zero": ("negative", from_zero),
    "NaN below all": ("nan", nan_below),
    "logits too narrow": ("close", narrower),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.dtypes["T"])
def test_other_choices_are_wrong(name: str, point: Point) -> None:
    regime, choose = WRONG[name]
    said = wrong(choose, point, regime)
    assert said is not None
    assert said.startswith("output: not exactly right")


@pytest.mark.parametrize("point", POINTS[:2], ids=lambda point: point.dtypes["T"])
def test_the_wrong_one_of_a_near_tie_is_wrong(point: Point) -> None:
    """Within one rounding of T, either may be right; always the other one is not."""
    for choose in (near_tie, lambda x, weight: last_of_equal(x @ weight.T)):
        said = wrong(choose, point, "close")
        assert said is not None
        assert "not exactly right" in said


def test_which_of_two_is_right() -> None:
    """Whole numbers, of which 512 and 513 are equal in bfloat16."""
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    x[0, :2] = 1.0

    def right(*values: int, chosen: int) -> bool:
        weight = torch.zeros(len(values), 8, dtype=torch.bfloat16)
        for row, value in zip(weight, values, strict=True):
            row[0], row[1] = value - value % 8, value % 8
        found = OP.derived
        assert found is not None
        picked = torch.tensor([chosen])
        return bool(found(x=x, weight=weight, output=picked)["output"] == picked)

    low, tie, high = 512, 513, 520
    assert right(low, tie, chosen=1)  # the largest
    assert right(low, tie, chosen=0)  # the first, where they are rounded
    assert right(tie, low, chosen=0)
    assert not right(tie, low, chosen=1)  # neither the largest nor the first
    assert not right(low, tie, tie, chosen=2)  # the largest, but not the first of them
    assert not right(high, tie, chosen=1)
    assert not right(tie, high, chosen=0)
