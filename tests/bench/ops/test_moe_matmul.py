"""The two expert matmuls on Hopper's MXFP4 layout: contracts, references, inputs and solutions."""

from __future__ import annotations

import hashlib
import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from op_judging import tells_right_from_wrong, wrong_with
from torch import Tensor

from patcher import bench
from patcher.bench import Language
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.cases import (
    Case,
    Expected,
    expect,
    make_inputs,
    scalars_by_name,
    value_problem,
)
from patcher.bench.judge.judge import Judge
from patcher.bench.judge.regimes import regimes_of
from patcher.bench.ops.arithmetic import evaluate
from patcher.bench.ops.contract import Point
from patcher.bench.runner.loading import load

NAMES = ("moe_matmul_swiglu", "moe_matmul_down")
OPS = {name: bench.load_op(name) for name in NAMES}
SOURCES = {
    (name, info.language): op.folder / "solutions" / info.name / f"{name}.py"
    for name, op in OPS.items()
    for info, _ in op.solutions()
    if info.language in (Language.TORCH, Language.TRITON)
}


def kernel_of(name: str, language: Language) -> Callable[..., Any]:
    return load(str(SOURCES[name, language]), "python", name)


def served(name: str) -> tuple[float, ...]:
    return tuple(scalar.value for scalar in OPS[name].contract.scalars)


def problem(name: str, case: Case) -> tuple[dict[str, Tensor], Expected]:
    values = make_inputs(OPS[name], case, "cpu")
    inputs = {tensor.name: values[tensor.name] for tensor in OPS[name].contract.tensors}
    return inputs, expect(OPS[name], case, inputs)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many small calls: threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def folded() -> tuple[Tensor, Tensor, int]:
    """One expert's weights and scales as they might lie in memory, and how many columns."""
    columns, depth = 320, 192
    weights = (torch.arange(columns // 4 * 2 * depth) * 73 % 251).to(torch.uint8)
    scales = (torch.arange((columns + 255) // 256 * 8 * depth) * 37 % 200 + 20).to(torch.uint8)
    return weights.view(-1, 2 * depth), scales.view(-1, depth), columns


UNFOLDED = "4c99f0c2d66d55ba176ce482004c5b050c2fac168563a0765ac19b67fafbe0c2"
"""sha256 of them in float32, by `unswizzle_data` of HopperMXValueLayout and HopperMXScaleLayout of
the triton_kernels in vLLM 0.25.1."""


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_is_unfolded_as_triton_kernels_does(name: str) -> None:
    folder = OPS[name].folder
    first = OPS["moe_matmul_swiglu"].folder
    exact, (weights, scales, columns) = runpy.run_path(str(folder / "reference.py")), folded()
    places = exact["laid_out"](columns, scales.shape[1], weights.device)
    found = [
        exact["dequantised"](weights, scales, places, exact["numbers"](weights.device)),
        runpy.run_path(str(first / "baselines.py"))["dequantised"](*folded()),
        runpy.run_path(str(SOURCES[name, Language.TORCH]))["numbers"](*folded()),
    ]
    for value in found:
        assert hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() == UNFOLDED


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_seeded_fit_the_contract_and_its_shapes_tell_the_axes(name: str) -> None:
    contract, inputs = OPS[name].contract, OPS[name].inputs
    for number, shape in enumerate(contract.hidden):
        regime = inputs.REGIMES[number % len(inputs.REGIMES)]
        point = Point(axes=shape.axes, dtypes=contract.dtype_choices()[0])
        once, again, other = (
            inputs.make(point, torch.Generator().manual_seed(seed), regime) for seed in (1, 1, 2)
        )
        assert list(once) != []
        for tensor in contract.tensors:
            value = once[tensor.name]
            assert value.shape == contract.shape(tensor, point)
            assert value.dtype is getattr(torch, point.dtypes[tensor.dtype])
            assert value.is_contiguous()
            assert tensor.access == "write" or value.equal(again[tensor.name])
        assert not once["weights"].equal(other["weights"])
    for sweep in contract.sweeps:
        for point in sweep.points():
            shapes = [contract.shape(tensor, point) for tensor in contract.tensors]
            assert contract.axes_of(shapes) == point.axes
            assert next(iter(contract.axes_of(shapes))) == "tokens"
            shapes[2] = (shapes[2][0], shapes[2][1] + 8, shapes[2][2])
            with pytest.raises(ValueError, match=" is "):
                contract.axes_of(shapes)


@pytest.mark.parametrize("regime", ["normal", "crowded", "ends"])
def test_the_tables_are_those_of_the_router(regime: str) -> None:
    tokens, top_k, experts = 21, 4, 32
    routed = runpy.run_path(str(OPS[NAMES[0]].folder / "inputs.py"))["routed"]
    tables = routed(tokens, top_k, experts, torch.Generator().manual_seed(3), regime)
    route = bench.load_op("moe_route")
    expert = torch.repeat_interleave(torch.arange(experts), tables["histogram"].long())
    logits = torch.zeros(tokens, experts)
    logits[tables["gather_index"].long() // top_k, expert] = 1.0
    point = Point(
        axes={"tokens": tokens, "experts": experts, "top_k": top_k},
        dtypes={"T": "float32", "I": "int32"},
    )
    given = route.inputs.make(point, torch.Generator().manual_seed(1), "normal")
    found = route.reference(**{**given, "logits": logits})
    for name in ("gather_index", "histogram", "token_offsets"):
        assert tables[name].tolist() == found[name].tolist()
    assert tables["tile_map"].tolist() == found["tile_map"][0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_torch_solution_is_right_in_every_regime_and_dtype(name: str) -> None:
    op, kernel = OPS[name], kernel_of(name, Language.TORCH)
    other = tuple(value * 100 for value in served(name))
    for index, dtypes in enumerate(op.contract.dtype_choices()):
        for number, shape in enumerate(op.contract.hidden):
            point = Point(axes=shape.axes, dtypes=dtypes)
            for turn, regime in enumerate(regimes_of(op)[(index + number) % 2 :: 2]):
                scalars = other if turn % 3 == 1 else served(name)
                case = Case(point, regime, 10 * index + number, scalars)
                assert wrong_with(OPS[name], case, kernel) is None, case.label()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planted_control_is_told_from_the_honest_baseline(name: str, dtype: str) -> None:
    op = OPS[name]
    for point in op.sweep("cpu").points():
        point = point.model_copy(update={"dtypes": {**point.dtypes, "T": dtype}})
        case = Case(point, "normal", 5, served(name))
        inputs, expected = problem(name, case)
        found = op.control(**inputs, **scalars_by_name(op, case))
        assert value_problem(op, [case], [expected], [found]) is not None, case.label()


def test_a_nan_may_be_dropped_by_the_clamps_or_be_kept() -> None:
    """The engine's kernel drops it (`tl.minimum`), PyTorch's clamp keeps it."""
    name = "moe_matmul_swiglu"
    point = OPS[name].sweep("cpu").points()[1]
    inputs, _ = problem(name, Case(point, "normal", 3, served(name)))
    inputs["bias"][:, 4:8] = float("nan")
    case = Case(point, "normal", 3, served(name))
    expected = expect(OPS[name], case, inputs)
    alpha, limit = served(name)
    dropped = expected.reference["output"][:, 2:4]
    assert dropped.flatten().tolist() == pytest.approx(
        [limit / (1 + math.exp(-alpha * limit)) * (limit + 1)] * dropped.numel()
    )
    for value in (expected.reference, expected.honest):
        found = {"output": value["output"].float().clone()}
        assert value_problem(OPS[name], [case], [expected], [found]) is None
    found["output"][:, 2] = 1.0
    assert value_problem(OPS[name], [case], [expected], [found]) is not None


def test_the_cost_is_that_of_the_experts_expected_to_be_chosen() -> None:
    contract = OPS["moe_matmul_swiglu"].contract
    few, *_, many = contract.sweeps[1].points()
    expert = 5760 * (2880 // 2 + 2880 // 32 + 4)
    rows = 2880 * 2 + 4 * (2880 * 2 + 4)
    # one token chooses four experts; of 128 tokens hardly any expert is left out
    assert contract.bytes_moved(few) == pytest.approx(4 * expert + rows)
    assert contract.bytes_moved(many) == pytest.approx(32 * expert + 128 * rows, rel=1e-6)
    routed = runpy.run_path(str(OPS[NAMES[0]].folder / "inputs.py"))["routed"]
    generator = torch.Generator().manual_seed(0)
    counts = [
        int((routed(8, 4, 32, generator, "normal")["histogram"] > 0).sum()) for _ in range(200)
    ]
    assert sum(counts) / 200 == pytest.approx(
        evaluate("32 * (1 - pow(1 - 4 / 32, 8))", {}), rel=0.02
    )
    with pytest.raises(OverflowError):
        evaluate("pow(10, pow(10, 10))", {})


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("moe_matmul_swiglu", "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu"),
        ("moe_matmul_down", "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1"),
        ("moe_matmul_swiglu", "moe_matmul_swiglu_kernel"),
        ("moe_matmul_down", "moe_matmul_down_kernel"),
    ],
)
def test_symbols_are_those_of_one_op(name: str, kernel: str) -> None:
    assert [n for n, op in bench.load_ops().items() if op.contract.matches(kernel)] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_the_engines_kernel_says_why_it_does_not_run_here(name: str) -> None:
    with pytest.raises(ImportError, match="CUDA device"):
        OPS[name].baselines["vllm"]("cpu")


SETTINGS = JudgeSettings(
    baseline="eager", pairs=3, points=1, threads=1, calls=20, lives_s=0.0, timeout_s=20
)
WRONG = {
    # the neighbour's scale: of the other of two 32s along k
    "moe_matmul_swiglu": ("permute(0, 3, 1, 6, 4, 2, 5)", "permute(0, 3, 1, 6, 4, 5, 2)"),
    # the fourth number of a word taken for one like the others
    "moe_matmul_down": ("shifted & 0x81C0, last", "shifted & 0x81C0, halves << 9 & 0x81C0"),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with open_judge(SETTINGS) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_the_judge_takes_the_right_one_and_says_what_is_wrong_with_another(
    name: str, judge: Judge
) -> None:
    tells_right_from_wrong(judge, name, SOURCES[name, Language.TORCH].read_text(), WRONG[name])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
def test_the_triton_solutions_are_right_in_the_interpreter() -> None:
    # in a process of its own: Triton reads the variable when it is imported
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, __file__],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == []


def interpreted(name: str) -> list[str]:
    """What is wrong with the Triton solution. Not in bfloat16, which the interpreter truncates."""
    op, kernel, found = OPS[name], kernel_of(name, Language.TRITON), []
    for number, shape in enumerate(op.contract.hidden[:3]):  # the interpreter is slow
        point = Point(axes=shape.axes, dtypes=op.sweep("cpu").dtypes)
        placed = "padded" if number else "plain"
        case = Case(point, op.inputs.REGIMES[number], number, served(name), placed)
        if said := wrong_with(OPS[name], case, kernel):
            found.append(f"{case.label()}: {said}")
    return found


if __name__ == "__main__":
    print(json.dumps([said for name in NAMES for said in interpreted(name)]))
