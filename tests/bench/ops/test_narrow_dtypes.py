"""Dtypes of at most 8 bits a number: the table, their codes, and ops in them judged by value."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patcher.bench import (
    DTYPES,
    Candidate,
    Contract,
    Dtype,
    Evaluation,
    Language,
    Outcome,
    UsageError,
)
from patcher.bench.judge import JudgeSettings, open_judge, regimes
from patcher.bench.judge.accuracy import explain_mismatch, numbers
from patcher.bench.judge.blob import Wanted, layout, read_set, strayed, write_set
from patcher.bench.judge.cases import Case, expect, make_inputs, value_problem
from patcher.bench.ops.codes import as_bytes, decode, encode, nudge, rounded
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op

OPS = Path(__file__).parents[2] / "data/ops"
NAMES = ("add_float8", "matmul_mxfp4", "matmul_nvfp4", "quantize_nvfp4")
NARROW = [dtype for dtype in DTYPES.values() if dtype.narrow]
CAST_BY_TORCH = [dtype for dtype in NARROW if dtype.numbers == 1]


def name_of(dtype: Dtype) -> str:
    return dtype.name


def all_codes(dtype: Dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype.torch_dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=name_of)
def test_the_table_agrees_with_torch(dtype: Dtype) -> None:
    assert dtype.item_bytes == dtype.torch_dtype.itemsize
    if dtype.exact:
        assert dtype.finite_max == pytest.approx(torch.iinfo(dtype.torch_dtype).max)
    elif dtype.numbers == 1:
        limits = torch.finfo(dtype.torch_dtype)
        assert (dtype.finite_max, dtype.eps) == (limits.max, limits.eps)
        if dtype.signed:
            assert dtype.smallest_normal == limits.tiny


@pytest.mark.parametrize("dtype", CAST_BY_TORCH, ids=name_of)
def test_codes_stand_for_what_torch_says(dtype: Dtype) -> None:
    codes = all_codes(dtype)
    assert torch.equal(decode(codes).nan_to_num(nan=-1.0), codes.double().nan_to_num(nan=-1.0))
    drawn = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    for factor in (dtype.finite_max / 8, 1.0, dtype.smallest_normal):
        values = drawn * factor
        if not dtype.signed:  # torch rounds float32's subnormal numbers by their own exponent
            values = values.abs().clamp_min(2.0**-126)
        assert torch.equal(rounded(values.double(), dtype), values.to(dtype.torch_dtype).double())


@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_every_number_is_encoded_as_itself(dtype: Dtype) -> None:
    found = decode(all_codes(dtype))
    again = decode(encode(found, dtype))
    assert torch.equal(found.nan_to_num(nan=-1.0), again.nan_to_num(nan=-1.0))
    assert float(found.nan_to_num(nan=0, posinf=0).max()) == dtype.finite_max
    assert float(found[found > 0].min()) == dtype.smallest


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float8_e4m3fn", 1e9, 448.0),
        ("float8_e4m3fn", -math.inf, -448.0),
        ("float8_e4m3fn", math.nan, math.nan),
        ("float8_e5m2", 61439.0, 57344.0),
        ("float8_e5m2", 61440.0, math.inf),
        ("float8_e8m0fnu", 0.0, 2.0**-127),
        ("float8_e8m0fnu", math.inf, 2.0**127),
        ("float4_e2m1fn_x2", 5.0, 4.0),
        ("float4_e2m1fn_x2", 2.5, 2.0),
        ("float4_e2m1fn_x2", -1.75, -2.0),
        ("float4_e2m1fn_x2", math.nan, 6.0),
        ("float4_e2m1fn_x2", -math.inf, -6.0),
    ],
)
def test_what_lies_between_and_beyond(name: str, value: float, expected: float) -> None:
    found = float(rounded(torch.tensor([value, 1.0], dtype=torch.float64), DTYPES[name])[0])
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_two_numbers_in_a_byte_the_first_in_the_lower_half() -> None:
    fp4 = DTYPES["float4_e2m1fn_x2"]
    packed = encode(torch.tensor([[0.5, -6.0, 1.0, 0.0]]), fp4)
    assert packed.dtype is torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8).tolist() == [[0xF1, 0x02]]
    assert decode(packed).tolist() == [[0.5, -6.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="3 make no item"):
        encode(torch.ones(2, 3), fp4)


@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_a_nudge_changes_one_number_alone(dtype: Dtype) -> None:
    whole = encode(decode(all_codes(dtype)).nan_to_num(nan=1, posinf=1, neginf=1), dtype)
    before = decode(whole)
    for index in range(0, len(before), 7):
        value = whole.clone()
        nudge(value, index)
        changed = (decode(value) != before).nonzero().flatten().tolist()
        assert changed == [index]


@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_red_zones_and_rows_of_any_dtype_travel(dtype: Dtype) -> None:
    plan = layout(
        [
            Wanted(name="x", dtype=dtype.name, shape=(3, 5), strides=(13, 1), shift=1),
            Wanted(name="out", dtype=dtype.name, shape=(7,)),
        ]
    )
    block = torch.empty(plan.set_bytes, dtype=torch.uint8)
    x = torch.arange(15, dtype=torch.uint8).view(3, 5).view(dtype.torch_dtype)
    write_set(plan, block, {"x": x})
    back = read_set(plan, block, ["x", "out"])
    assert back["x"].dtype is dtype.torch_dtype
    assert torch.equal(as_bytes(back["x"]), as_bytes(x))
    poison = decode(back["out"])
    assert bool((poison.isnan() if dtype.nan else poison == -6.0).all())
    assert strayed(plan, block[None]) == []
    block[plan.slots[0].begin + 5] = 0  # between two rows
    assert strayed(plan, block[None]) == ["x"]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> dict[str, Op]:
    monkeypatch.setenv("PATCHER_OPS", str(OPS))
    return {name: Op(OPS / name) for name in NAMES}


def small(op: Op) -> Point:
    return op.contract.sweeps[0].points()[0]


def test_regimes_reach_what_a_narrow_dtype_has(ops: dict[str, Op]) -> None:
    def made(op: Op, regime: str, dtype: str = "float8_e4m3fn") -> Tensor:
        dtypes = {**small(op).dtypes, "T": dtype} if op.name == "add_float8" else small(op).dtypes
        point = Point(axes=small(op).axes, dtypes=dtypes)
        name = regimes.free(op)[-1]
        return decode(regimes.make(op, point, 3, regime, "cpu", only=name)[name])

    add, matmul = ops["add_float8"], ops["matmul_mxfp4"]
    assert made(add, "nan").isnan().any()
    assert made(add, "inf").abs().max() == 448.0
    assert made(add, "inf", "float8_e5m2").isinf().any()
    large = made(add, "large").abs()
    assert float((large == 448.0).double().mean()) > 0.1
    tiny = made(add, "denormal").abs()
    assert float(((tiny > 0) & (tiny < 2.0**-6)).double().mean()) > 0.3
    assert made(add, "one_hot").count_nonzero(-1).eq(1).all()
    assert (made(matmul, "nan").abs() == 6.0).any()  # it has no NaN
    assert made(matmul, "zeros").eq(0).all()
    assert made(matmul, "ones").eq(1).all()
    zeros = made(add, "negative_zero")
    assert (zeros.signbit() & (zeros == 0)).any()


def test_only_numbers_are_compared_not_bits() -> None:
    e4m3 = DTYPES["float8_e4m3fn"]
    exact = torch.tensor([0.0, 1.0, math.nan, 448.0, -0.0], dtype=torch.float64)
    bits = {
        "right": [0x80, 0x38, 0xFF, 0x7E, 0x00],
        "a zero of the other sign and another NaN": [0x00, 0x38, 0x7F, 0x7E, 0x80],
        "a number for NaN": [0x00, 0x38, 0x7E, 0x7E, 0x00],
        "NaN for the largest": [0x00, 0x38, 0x7F, 0x7F, 0x00],
    }
    honest = decode(torch.tensor(bits["right"], dtype=torch.uint8), e4m3)
    found = {
        what: explain_mismatch(
            decode(torch.tensor(codes, dtype=torch.uint8), e4m3), honest, exact, 1, stored=e4m3
        )
        for what, codes in bits.items()
    }
    assert found["right"] is found["a zero of the other sign and another NaN"] is None
    assert "non-finite" in str(found["a number for NaN"])
    assert found["NaN for the largest"] is not None


def test_beyond_the_largest_number_is_the_largest() -> None:
    e4m3 = DTYPES["float8_e4m3fn"]
    exact = torch.tensor([900.0, 1.0], dtype=torch.float64)
    honest = torch.tensor([448.0, 1.0], dtype=torch.float64)
    assert explain_mismatch(honest, honest, exact, 1, stored=e4m3) is None
    off = torch.tensor([384.0, 1.0], dtype=torch.float64)
    assert explain_mismatch(off, honest, exact, 1, stored=e4m3) is not None


def test_a_number_times_its_scale_is_what_counts(ops: dict[str, Op]) -> None:
    op = ops["quantize_nvfp4"]
    case = Case(small(op), "normal", 5, ())
    inputs = make_inputs(op, case, "cpu")
    expected = expect(op, case, inputs)
    packed, scales = expected.honest["packed"], expected.honest["scales"]

    def problem(packed: Tensor, scales: Tensor) -> str | None:
        return value_problem(op, [case], [expected], [{"packed": packed, "scales": scales}])

    assert problem(packed, scales) is None
    # the same products from other factors, where no number is too large or too fine to double
    blocks = decode(packed).unflatten(-1, (-1, 16))
    movable = ((blocks.abs() <= 3) & (blocks.abs() != 0.5) | (blocks == 0)).all(-1)
    doubled = torch.where(movable.unsqueeze(-1), 2 * blocks, blocks).flatten(-2)
    halved = torch.where(movable, decode(scales) / 2, decode(scales))
    fp4, e4m3 = (DTYPES[name] for name in ("float4_e2m1fn_x2", "float8_e4m3fn"))
    assert problem(encode(doubled, fp4), encode(halved, e4m3)) is None
    # signs of zeros are bits, and no values
    codes = packed.view(torch.uint8)
    low, high = codes & 15, codes >> 4
    plain = torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4
    assert problem(plain.view(packed.dtype), scales) is None
    assert problem(packed, encode(decode(scales) * 2, e4m3)) is not None
    swapped = (low << 4 | high).view(packed.dtype)  # the first number in the upper half
    assert problem(swapped, scales) is not None


def test_scales_of_any_block(ops: dict[str, Op]) -> None:
    def contract(block: list[int | str], shape: list[str]) -> Contract:
        told: dict[str, Any] = ops["quantize_nvfp4"].contract.model_dump(mode="json")
        told["tensors"][2] |= {"block": block, "shape": shape}
        return Contract.model_validate(told)

    packed = encode(torch.ones(4, 6), DTYPES["float4_e2m1fn_x2"])

    point = Point(axes={"rows": 4, "n": 6}, dtypes={})

    def products(block: list[int | str], scales: list[float]) -> list[list[float]]:
        known = contract(block, ["rows", "n / 16"])
        values = {"packed": packed, "scales": torch.tensor(scales)}
        return numbers(known, known.tensors[1], [values], torch.device("cpu"), point)[0].tolist()

    assert products([0, 0], [3.0]) == [[3.0] * 6] * 4
    assert products([2, 4], [1, 2, 3, 4]) == 2 * [[1.0] * 4 + [2.0] * 2] + 2 * [
        [3.0] * 4 + [4.0] * 2
    ]
    assert products([1, 0], [1, 2, 3, 4]) == [[float(row)] * 6 for row in range(1, 5)]
    # a block's size may follow from the axes
    assert products(["rows / 2", "n - 2"], [1, 2, 3, 4]) == products([2, 4], [1, 2, 3, 4])
    for wrong, said in (("n / 4", "is 1.5"), ("n - 6", "is 0")):
        with pytest.raises(UsageError, match=said):
            products([1, wrong], [1, 2, 3, 4])
    with pytest.raises(UsageError, match="needs 4"):
        products([2, 4], [1, 2, 3])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtypes": {"T": ["float9"], "Q": ["uint8"], "S": ["uint8"]}}, "float9 of T is none of"),
        ({"dtypes": {"T": ["=Q"], "Q": ["=X"], "S": ["uint8"]}}, "=X of Q is none of"),
    ],
)
def test_a_contract_with_an_unknown_dtype_is_refused(
    ops: dict[str, Op], change: dict[str, Any], said: str
) -> None:
    told = ops["quantize_nvfp4"].contract.model_dump() | change
    with pytest.raises(ValueError, match=said):
        Contract.model_validate(told)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ({"scale_of": "nothing"}, "scales nothing, which holds no values"),
        ({"scale_of": "scales"}, "scales scales, which holds no values"),
        ({"block": [16]}, "a size for each axis"),
        ({"block": [1, -16]}, "no size below 0"),
        ({"scale_of": ""}, "a size for each axis"),
    ],
)
def test_a_scale_of_nothing_is_refused(
    ops: dict[str, Op], scale: dict[str, Any], said: str
) -> None:
    told = ops["quantize_nvfp4"].contract.model_dump(mode="json")
    told["tensors"][2] |= scale
    with pytest.raises(ValueError, match=said):
        Contract.model_validate(told)


def solution(op: str, kind: str) -> Path:
    [source] = [
        path for path in (OPS / op / "solutions" / kind).iterdir() if path.suffix != ".toml"
    ]
    return source


Judged = Callable[[str, Language, str], Evaluation]


@pytest.fixture(scope="module")
def judged() -> Iterator[Judged]:
    settings = JudgeSettings(
        device="cpu", baseline="eager", pairs=3, calls=40, lives_s=0.0, timeout_s=20, threads=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATCHER_OPS", str(OPS))
        with open_judge(settings) as judge:
            yield lambda op, language, source: judge.evaluate(
                Candidate(op=op, language=language, source=source), lambda *_: None
            )


def evaluated(name: str, kind: str) -> dict[str, Any]:
    """What `patcher evaluate` prints of a solution; once more where only the clock could not tell,
    on a machine that is busy.
    """
    command = [sys.executable, "-P", "-m", "patcher", "evaluate", name, str(solution(name, kind))]
    options = ["--device", "cpu", "--baseline", "eager", "--pairs", "3", "--json"]
    for _ in range(4):
        result = subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            env={**os.environ, "PATCHER_OPS": str(OPS)},
            check=False,
        )
        assert result.returncode in (0, 1), result.stderr
        told: dict[str, Any] = json.loads(result.stdout)
        failed = [check["name"] for check in told["checks"] if not check["passed"]]
        if failed != ["clocks"]:
            break
    return told


@pytest.mark.parametrize("kind", ["cpu_cpp", "torch_plain"])
@pytest.mark.parametrize("name", NAMES)
def test_patcher_evaluate_finds_a_right_kernel_right(name: str, kind: str) -> None:
    told = evaluated(name, kind)
    assert told["outcome"] in (Outcome.CORRECT, Outcome.TOO_SLOW), told
    checks = {check["name"]: check for check in told["checks"]}
    assert all(check["passed"] for check in checks.values())
    assert "a planted low-precision version failed at" in checks["control"]["detail"]


WRONG = {
    # the other half of a byte first; another exponent's bias; a scale's neighbour; a sign lost
    ("matmul_mxfp4", "cpu_cpp"): ("wide[k] = fp4[both & 15]", "wide[k] = fp4[both >> 4]"),
    ("matmul_mxfp4", "torch_plain"): ("scales.float()", "scales.float().roll(1, -1)"),
    ("matmul_nvfp4", "cpu_cpp"): ("exponent - 10)", "exponent - 11)"),
    ("matmul_nvfp4", "torch_plain"): ("-each for each", "each for each"),
    ("add_float8", "cpu_cpp"): ("steps);", "steps) - (steps > 9);"),
    ("add_float8", "torch_plain"): ("-largest, largest", "-largest / 2, largest / 2"),
    ("quantize_nvfp4", "cpu_cpp"): ("std::signbit(value) ? 8 : 0", "0"),
    ("quantize_nvfp4", "torch_plain"): ("/ 6)", "/ 8)"),
}


@pytest.mark.parametrize(("name", "kind"), WRONG)
def test_a_wrong_kernel_is_a_mismatch(judged: Judged, name: str, kind: str) -> None:
    old, new = WRONG[name, kind]
    source = solution(name, kind).read_text()
    assert source.count(old) == 1
    language = Language.CPP if kind == "cpu_cpp" else Language.TORCH
    wrong = source.replace(old, new)
    evaluation = judged(name, language, wrong)
    assert evaluation.outcome is Outcome.MISMATCH
    assert evaluation.failed_checks[0].name == "values"


@pytest.mark.parametrize("name", NAMES)
def test_the_control_itself_is_a_mismatch(judged: Judged, name: str) -> None:
    """What is planted in each judgement, handed in as a candidate."""
    contract = Op(OPS / name).contract
    names = [tensor.name for tensor in contract.tensors] + [s.name for s in contract.scalars]
    source = (OPS / name / "reference.py").read_text() + (
        f"\n\ndef {name}({', '.join(names)}):\n"
        f"    found = control({', '.join(names)})\n"
        "    given = locals()\n"
        "    for name, value in found.items():\n"
        "        given[name].copy_(value)\n"
    )
    evaluation = judged(name, Language.TORCH, source)
    assert evaluation.outcome is Outcome.MISMATCH
    assert evaluation.failed_checks[0].name == "values"


def test_what_a_kernel_reads_it_must_not_write(judged: Judged) -> None:
    source = solution("matmul_nvfp4", "cpu_cpp").read_text()
    changed = source.replace(
        "std::vector<float> wide(depth);",
        "std::vector<float> wide(depth); const_cast<uint8_t*>(w)[0] ^= 0x80;",
    )
    evaluation = judged("matmul_nvfp4", Language.CPP, changed)
    assert evaluation.outcome is Outcome.GUARD_VIOLATION
    assert "changed weights" in evaluation.failed_checks[0].detail
