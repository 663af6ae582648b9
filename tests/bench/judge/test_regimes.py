"""Inputs that the judge makes of any op's, and how far from right an honest sum may be."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from patcher import bench
from patcher.bench.judge import regimes
from patcher.bench.judge.accuracy import explain_mismatch
from patcher.bench.judge.baseline_errors import carried_over
from patcher.bench.judge.cases import (
    Case,
    Secrets,
    correctness_cases,
    expect,
    make_inputs,
    placements,
    tensors_of,
    value_problem,
)
from patcher.bench.judge.drawing import drawn_points
from patcher.bench.ops.dtypes import dtype_of
from patcher.bench.ops.op import Op, load_op, load_ops
from patcher.bench.selftest.scorecard import corpus_folder

NORM = bench.load_op("fused_add_rms_norm")
LINEAR = Op(corpus_folder() / "ops" / "linear")
POINT = bench.Point(axes={"tokens": 4, "hidden": 64}, dtypes={"T": "bfloat16", "W": "float32"})


@pytest.mark.parametrize("regime", regimes.regimes_of(NORM))
def test_a_regime_is_seeded_and_keeps_dtypes(regime: str) -> None:
    once, again, other = (regimes.make(NORM, POINT, seed, regime, "cpu") for seed in (5, 5, 6))
    normal = regimes.make(NORM, POINT, 5, "normal", "cpu")
    for name, value in once.items():
        assert (value.dtype, value.shape) == (normal[name].dtype, normal[name].shape)
        assert torch.equal(value.nan_to_num(), again[name].nan_to_num())
    if regime not in ("normal", "zeros", "ones"):
        assert any(not torch.equal(once[name], other[name]) for name in once)


def test_each_tensor_is_tried_alone() -> None:
    assert regimes.targets(NORM, "nan") == ["input", "residual", "weight"]
    made = regimes.make(NORM, POINT, 5, "nan", "cpu", only="weight")
    assert made["weight"].isnan().any()
    assert not made["input"].isnan().any()


def test_what_the_regimes_hold() -> None:
    def of(regime: str) -> torch.Tensor:
        return regimes.make(NORM, POINT, 3, regime, "cpu")["input"].float()

    assert of("inf").isinf().any()
    assert (of("one_hot").sum(-1) == 1).all()
    assert ((of("negative_zero") == 0) & of("negative_zero").signbit()).any()
    subnormal = regimes.make(NORM, POINT, 3, "denormal", "cpu")["input"].abs().max()
    assert 0 < float(subnormal) < torch.finfo(torch.float32).tiny


def test_exact_inputs_give_whole_sums() -> None:
    point = LINEAR.sweep("cpu").points()[-1]
    made = regimes.make(LINEAR, point, 1, regimes.EXACT, "cpu")
    assert set(made["x"].unique().tolist()) == {0.0, 1.0}
    reference = LINEAR.reference(**made)["out"]
    assert torch.equal(reference, reference.round())
    off = reference.float()
    assert explain_mismatch(off, off, reference, 256, exact=True) is None
    off[3, 3] += 1
    assert "not exactly right" in str(explain_mismatch(off, off, reference, 256, exact=True))


def test_cases_hold_every_regime_every_point_and_every_shape() -> None:
    sweep = NORM.sweep("cuda")
    cases = correctness_cases(NORM, sweep, Secrets(1))
    assert {case.regime for case in cases} >= set(regimes.regimes_of(NORM))
    labels = {case.point.label() for case in cases}
    assert labels >= {point.label() for point in sweep.points()}
    hidden = {tuple(shape.axes.items()) for shape in NORM.contract.hidden}
    assert {tuple(case.point.axes.items()) for case in cases} >= hidden
    assert len({case.seed for case in cases}) == len(cases)
    assert len(correctness_cases(NORM, sweep, Secrets(1), rounds=2)) == 2 * len(cases)
    assert correctness_cases(NORM, sweep, Secrets(1)) == cases  # a given seed repeats


@pytest.mark.parametrize("op", load_ops().values(), ids=lambda op: op.name)
def test_points_are_drawn_anew_within_the_guards(op: Op) -> None:
    sweep = op.sweep("cuda" if any(s.device == "cuda" for s in op.contract.sweeps) else "cpu")
    known = {point.label() for point in sweep.points()}
    seen: set[str] = set()
    for seed in range(30):
        points = drawn_points(op.contract, sweep, random.Random(seed))
        assert {tuple(p.dtypes.items()) for p in points} == {
            tuple(choice.items()) for choice in op.contract.dtype_choices()
        }
        seen |= {point.label() for point in points}
        for point in points:
            largest = max(*sweep.values, *(h.axes[sweep.axis] for h in op.contract.hidden))
            assert 1 <= point.axes[sweep.axis] <= largest
            for axis, guard in op.contract.guards.axes.items():
                size = point.axes.get(axis, guard.minimum)
                assert size % guard.multiple_of == 0
                assert size >= guard.minimum
                assert guard.maximum is None or size <= guard.maximum
    assert len(seen - known) > 30
    assert drawn_points(op.contract, sweep, random.Random(1)) == drawn_points(
        op.contract, sweep, random.Random(1)
    )


def test_a_case_of_every_drawn_point_can_be_made() -> None:
    for op in load_ops().values():
        sweep = op.sweep("cpu")
        for seed in range(3):
            for point in drawn_points(op.contract, sweep, random.Random(seed)):
                values = regimes.make(op, point, seed, "normal", "cpu")
                scalars = {each.name: each.value for each in op.contract.scalars}
                assert op.reference(**values, **scalars)


@pytest.mark.parametrize("name", ["moe_reduce", "rope_kv_update"])
def test_a_regime_is_tried_where_its_tensor_has_elements(name: str) -> None:
    op = load_op(name)
    optional = {"moe_reduce": "scales", "rope_kv_update": "bias"}[name]
    [tensor] = [each for each in op.contract.tensors if each.name == optional]
    for seed in range(5):
        cases = correctness_cases(op, op.sweep("cpu"), Secrets(seed))
        alone = [case for case in cases if case.only == optional]
        assert {case.regime for case in alone} >= {"zeros", "ones", "nan"}
        assert all(math.prod(op.contract.shape(tensor, case.point)) for case in alone)


def test_padded_and_misaligned_tensors_where_the_contract_allows(tmp_path: Path) -> None:
    text = (NORM.folder / "op.toml").read_text(encoding="utf-8")
    assert placements(NORM) == []
    loose = text.replace('access = "update"', 'access = "update"\nlayout = "rows"\nalignment = 2')
    (tmp_path / "op.toml").write_text(loose, encoding="utf-8")
    op = Op(tmp_path)
    assert placements(op) == ["padded", "shifted"]
    assert tensors_of(op, POINT, "padded").slots[0].strides == (64 + 8, 1)
    assert tensors_of(op, POINT, "shifted").slots[0].begin % 16 == 2
    assert tensors_of(op, POINT, "shifted").slots[2].begin % 16 == 0  # the weight is aligned


def test_a_plain_sum_in_float32_is_honest_and_one_in_bfloat16_is_not() -> None:
    values = torch.rand(64, 512, generator=torch.Generator().manual_seed(0))
    reference = values.double().sum(-1)
    plain = torch.zeros(64)
    for column in range(512):
        plain += values[:, column]
    narrow = values.bfloat16().float().sum(-1)
    assert explain_mismatch(plain, values.sum(-1), reference, 512) is None
    assert explain_mismatch(narrow, values.sum(-1), reference, 512) is not None


def test_a_plain_sum_of_terms_that_are_alike_is_honest_and_one_in_bfloat16_is_not() -> None:
    """A softmax of one hot number: 16,384 times exp(-1), all rounded to one side."""
    columns = 16_385
    hot = torch.zeros(2, columns)
    hot[0, 7] = hot[1, 4000] = 1.0
    reference = hot.double().softmax(-1)
    terms = (hot - 1).exp()
    plain, narrow = torch.zeros(2, 1), torch.zeros(2, 1)
    for column in range(columns):
        plain += terms[:, column : column + 1]
        narrow += terms[:, column : column + 1].bfloat16()
    honest = hot.softmax(-1)

    def problem(total: torch.Tensor, alike: bool) -> str | None:
        return explain_mismatch(terms / total, honest, reference, columns, alike=alike)

    assert problem(plain, alike=True) is None
    assert problem(plain, alike=False) is not None
    assert problem(narrow, alike=True) is not None


def test_where_few_numbers_hold_the_error_its_tail_is_the_largest() -> None:
    """As where large numbers cancel: another order of a sum puts the error at other elements."""
    reference = torch.ones(64, 64, dtype=torch.float64)
    one, other = reference.float(), reference.float()
    one[0, 0] += 4e-3
    other.view(-1)[:5000:900] += 1.5e-3
    assert explain_mismatch(other, one, reference, 64) is None
    many = one + 1e-5 * torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    many[0, 0] = 1.0
    assert explain_mismatch(other, many, reference, 64) is not None
    other[3, 3] += 1e-2
    assert explain_mismatch(other, one, reference, 64) is not None


def test_an_error_in_one_corner_is_seen_where_the_whole_hides_it() -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(64, 1024, generator=generator, dtype=torch.float64)
    honest = reference.bfloat16()
    corner = honest.clone()
    corner[:, 896:] = ((reference[:, 896:] * 3).bfloat16() / 3).bfloat16()
    problem = explain_mismatch(corner, honest, reference, 1024)
    assert problem is not None
    assert "of axis 1" in problem


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_must_be_where_the_reference_has_it(value: float) -> None:
    reference = torch.ones(4, 64, dtype=torch.float64)
    reference[2, 5] = value
    honest = reference.float()
    assert explain_mismatch(honest.clone(), honest, reference, 64) is None
    for wrong in (0.0, -value if value == value else 1.0):
        changed = honest.clone()
        changed[2, 5] = wrong
        assert "non-finite" in str(explain_mismatch(changed, honest, reference, 64))


def test_at_the_end_of_a_range_an_allowed_error_may_end_beyond_it() -> None:
    """An expert's matmul in fp8 wrote -65216 for -65543 in float16, and was no number by that."""
    generator = torch.Generator().manual_seed(2)
    reference = torch.randn(64, 64, generator=generator, dtype=torch.float64) * 2e4
    reference[1] = torch.linspace(65_400.0, 65_600.0, 64, dtype=torch.float64)
    reference[2] = -reference[1]

    def erring(by: float) -> torch.Tensor:
        return (reference * (1 + by)).half()

    honest = erring(2**-8 * 1.1)
    for by in (2**-8, -(2**-8)):
        assert erring(by)[1].isfinite().any() == (by < 0)
        assert explain_mismatch(erring(by), honest, reference, 64) is None
    far = erring(-(2**-8))
    reference[2, 0] = -1e6
    assert "non-finite" in str(explain_mismatch(far, honest, reference, 64))
    reference[2, 0] = -65_400.0
    far[0, 0] = math.copysign(math.inf, far[0, 0])
    assert "rmse inf" in str(explain_mismatch(far, honest, reference, 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_is_right_that_the_accuracy_baseline_has_too(value: float) -> None:
    """As PyTorch's fused attention on a CPU has zeros for a row of NaN."""
    honest = torch.ones(4, 64)
    reference = honest.double()
    reference[2, 5] = value
    assert explain_mismatch(honest.clone(), honest, reference, 64) is None
    other = honest.clone()
    other[2, 5] = 0.5
    assert "non-finite" in str(explain_mismatch(other, honest, reference, 64))


def test_where_the_accuracy_baseline_has_no_number_a_small_sum_errs_by_the_size_of_its_terms() -> (
    None
):
    """Kernels that drop a NaN, where that baseline spreads it, were refused at sums near zero."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(16, 256, generator=generator, dtype=torch.float64)
    error = torch.randn(16, 256, generator=generator, dtype=torch.float64)
    spread = torch.full((16, 256), math.nan)

    def problem(size: float) -> str | None:
        value = (reference + size * error).bfloat16()
        assert ((value.double() - reference).abs() > 2**-5 * reference.abs()).any()
        return explain_mismatch(value, spread, reference, 256)

    assert problem(2**-9) is None
    assert "non-finite" in str(problem(2**-5))
    # a number beyond the range counts by itself, whatever the size of others
    reference[0], spread[0] = 1e6, math.inf
    assert "non-finite" in str(
        explain_mismatch(reference.clamp(max=6e4).half(), spread, reference, 256)
    )


def test_experts_that_drop_a_nan_as_the_engine_does_are_right() -> None:
    """vLLM's activation drops it by fmin and fmax, where PyTorch's clamp spreads it."""
    op = load_op("moe_block")
    axes = dict(op.contract.hidden[0].axes) | {"hidden": 512, "inner": 192}
    point = bench.Point(axes=axes, dtypes=op.sweep("cuda", "bf16").dtypes)
    scalars = op.served_scalars
    case = Case(point, "nan", 2, scalars, only="gate_up_bias")
    inputs = make_inputs(op, case, "cpu")
    expected = expect(op, case, inputs)
    assert expected.reference["total"].isfinite().all()
    assert expected.honest["total"].isnan().any()
    number = inputs["gate_up_bias"]
    # beyond the limit, as which gate and up count if they are NaN
    dropped = torch.where(number.isnan(), 1e4, number)
    run = op.accuracy("cpu")
    given = {name: value.clone() for name, value in inputs.items()} | {"gate_up_bias": dropped}
    names = [tensor.name for tensor in op.contract.tensors if tensor.access != "read"]
    made = dict(zip(names, run(*given.values(), *scalars), strict=True))
    assert value_problem(op, [case], [expected], [made]) is None
    made["total"] = made["total"] * 1.1
    assert value_problem(op, [case], [expected], [made]) is not None


def test_the_baselines_error_is_carried_over_to_another_choice() -> None:
    """Both round in between, and choose differently; one that errs twice as much is told."""
    bfloat16 = dtype_of(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(64, 64, generator=generator).double()

    own, reference = noise(1.0), noise(1.0)
    honest = (own + noise(0.02)).bfloat16()
    right, wrong = ((reference + noise(size)).bfloat16() for size in (0.02, 0.04))
    carried = carried_over(honest, own, reference, bfloat16)
    assert explain_mismatch(right, carried, reference, 64) is None
    assert explain_mismatch(right, reference.bfloat16(), reference, 64) is not None
    assert explain_mismatch(wrong, carried, reference, 64) is not None
    # special values: its own, unless its choice alone brought them
    own[0, 0], own[1, 1], honest[2, 2] = math.nan, math.inf, math.nan
    honest[0, 0], honest[1, 1] = math.nan, math.inf
    carried = carried_over(honest, own, reference, bfloat16)
    assert carried.isnan().nonzero().tolist() == [[2, 2]]
    assert torch.equal(carried[0, 0], reference[0, 0].bfloat16().double())


def test_a_constant_tensor_is_tried_where_many_rows_are() -> None:
    """Of one row all outputs are one sum; small by chance, it would accuse an honest order."""
    op = Op(Path(__file__).parents[2] / "corpus/ops/linear")
    sweep = op.sweep("cpu")
    middle = sweep.values[len(sweep.values) // 2]
    for seed in range(20):
        cases = correctness_cases(op, sweep, Secrets(seed))
        alone = [case for case in cases if case.only and case.regime == "ones"]
        assert alone
        assert all(case.point.axes[sweep.axis] >= middle for case in alone)


def test_a_plain_sum_is_not_accused_where_a_constant_tensor_meets_many_rows() -> None:
    """At one row some are (3 of 400 where this was written), so that is not tried."""
    op = Op(Path(__file__).parents[2] / "corpus/ops/linear")

    def accused(point: bench.Point, seed: int) -> bool:
        case = Case(point, "ones", seed, (), only="weight")
        inputs = make_inputs(op, case, "cpu")
        out = torch.zeros(len(inputs["x"]), len(inputs["weight"]))
        for k in range(inputs["x"].shape[1]):
            out += inputs["x"][:, k : k + 1] * inputs["weight"][:, k]
        return value_problem(op, [case], [expect(op, case, inputs)], [{"out": out}]) is not None

    tried = op.sweep("cpu").points()[1:]
    assert [sum(accused(point, seed) for seed in range(400)) for point in tried] == [0, 0]
