"""The contract, the reference, the inputs and the baselines of every op in the library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from patcher import bench
from patcher.bench.judge.accuracy import error_of, explain_mismatch
from patcher.bench.ops.contract import Point, _arithmetic
from patcher.bench.ops.op import Op, user_op_folders
from patcher.bench.ops.op_files import points_by_op

OP = bench.load_op("fused_add_rms_norm")


def test_contract_says_what_the_kernel_reads_and_writes() -> None:
    contract = OP.contract
    assert contract.signature() == "fused_add_rms_norm(input, residual, weight, epsilon)"
    assert [tensor.name for tensor in contract.written] == ["input", "residual"]
    assert {"T": "bfloat16", "W": "bfloat16"} in contract.dtype_choices()
    assert {"T": "float32", "W": "float32"} in contract.dtype_choices()
    assert len(contract.dtype_choices()) == 5  # float32 twice is once


def test_cost_counts_each_byte_once() -> None:
    point = Point(axes={"tokens": 8, "hidden": 2880}, dtypes={"T": "bfloat16", "W": "float32"})
    # input and residual are read and written in 2 bytes, the weight is read in 4
    assert OP.contract.bytes_moved(point) == 4 * 8 * 2880 * 2 + 2880 * 4


@pytest.mark.parametrize("expression", ["__import__('os')", "tokens ** 2", "tokens.real", "[1]"])
def test_cost_is_arithmetic_and_nothing_else(expression: str) -> None:
    point = Point(axes={"tokens": 8}, dtypes={})
    with pytest.raises((ValueError, KeyError)):
        _arithmetic(expression, point)


def test_unknown_op_names_what_there_is() -> None:
    with pytest.raises(bench.UsageError, match="unknown op 'nope'") as caught:
        bench.load_op("nope")
    assert "fused_add_rms_norm" in caught.value.hint


@pytest.mark.parametrize("regime", OP.inputs.REGIMES)
def test_inputs_are_seeded_and_fit_the_contract(regime: str) -> None:
    point = Point(axes={"tokens": 3, "hidden": 64}, dtypes={"T": "bfloat16", "W": "float32"})
    once, again, other = (
        OP.inputs.make(point, torch.Generator().manual_seed(seed), regime) for seed in (1, 1, 2)
    )
    for tensor in OP.contract.tensors:
        value = once[tensor.name]
        assert value.shape == OP.contract.shape(tensor, point)
        assert value.dtype is getattr(torch, point.dtypes[tensor.dtype])
        assert value.is_contiguous()
        assert torch.equal(value, again[tensor.name])
    assert not torch.equal(once["weight"], other["weight"])


@pytest.mark.parametrize("dtypes", OP.contract.dtype_choices(), ids=lambda d: "-".join(d.values()))
def test_eager_baseline_agrees_with_the_reference(dtypes: dict[str, str]) -> None:
    point = Point(axes={"tokens": 4, "hidden": 256}, dtypes=dtypes)
    inputs = OP.inputs.make(point, torch.Generator().manual_seed(3), "normal")
    expected = OP.reference(**inputs, epsilon=1e-5)
    output, residual = OP.baselines["eager"]("cpu")(*inputs.values(), 1e-5)
    roundoff = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}[dtypes["T"]]
    for value, name in ((output, "input"), (residual, "residual")):
        worst = error_of(value, expected[name]).largest
        assert worst <= 2 * roundoff * float(expected[name].abs().max())


def test_transformers_norm_is_what_the_eager_baseline_says() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

    norm = GptOssRMSNorm(64, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    added, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    total = residual + added
    output, summed = OP.baselines["eager"]("cpu")(added, residual, norm.weight, 1e-5)
    assert torch.equal(summed, total)
    assert torch.equal(output, norm(total))


def test_gpu_baselines_say_why_they_do_not_run_here() -> None:
    for name in ("vllm", "flashinfer"):
        with pytest.raises(ImportError, match="CUDA device"):
            OP.baselines[name]("cpu")


@pytest.mark.parametrize("dtypes", OP.contract.dtype_choices(), ids=lambda d: "-".join(d.values()))
def test_the_planted_control_is_told_from_the_honest_baseline(dtypes: dict[str, str]) -> None:
    point = Point(axes={"tokens": 8, "hidden": 2880}, dtypes=dtypes)
    inputs = OP.inputs.make(point, torch.Generator().manual_seed(5), "normal")
    expected = OP.reference(**inputs, epsilon=1e-5)
    honest = OP.baselines["eager"]("cpu")(*inputs.values(), 1e-5)[0]
    planted = OP.control(**inputs, epsilon=1e-5)["input"]
    assert explain_mismatch(honest, honest, expected["input"], 2880) is None
    assert explain_mismatch(planted, honest, expected["input"], 2880) is not None


@pytest.mark.parametrize(
    ("constant", "hint"),
    [("HONEST", "rename its constant HONEST to ACCURACY_BASELINE"), ("OTHER", "set ACCURACY_")],
)
def test_an_op_without_an_accuracy_baseline_is_told_how_to_name_it(
    tmp_path: Path, constant: str, hint: str
) -> None:
    shutil.copytree(Path(__file__).parents[2] / "data/ops/scaled_add", tmp_path / "scaled_add")
    assert Op(tmp_path / "scaled_add").accuracy_baseline == "eager"
    shutil.copytree(tmp_path / "scaled_add", tmp_path / "mine" / "scaled_add")
    file = tmp_path / "mine" / "scaled_add" / "baselines.py"
    file.write_text(file.read_text().replace("ACCURACY_BASELINE", constant))
    with pytest.raises(bench.UsageError, match="names no ACCURACY_BASELINE") as caught:
        _ = Op(tmp_path / "mine" / "scaled_add").accuracy_baseline
    assert hint in caught.value.hint


def test_two_libraries_may_have_an_op_of_one_name() -> None:
    folders = (
        Path(__file__).parents[3] / "kernels/linear",
        Path(__file__).parents[2] / "corpus/ops/linear",
    )
    first, second = map(Op, folders)
    assert first.name == second.name == "linear"
    assert first.inputs is not second.inputs
    assert first.reference is not second.reference
    assert first.inputs is Op(folders[0]).inputs


def test_a_users_op_may_have_no_solution_and_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).parents[2] / "corpus/ops/linear"
    shutil.copytree(source, tmp_path / "mine/bare", ignore=shutil.ignore_patterns("solutions"))
    contract = tmp_path / "mine/bare/op.toml"
    contract.write_text(contract.read_text().replace('name = "linear"', 'name = "bare"', 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHER_OPS", "mine")

    op = bench.load_op("bare")

    assert list(op.solutions()) == []
    assert user_op_folders() == str(tmp_path / "mine")


def test_a_contracts_terms_do_not_depend_on_its_prose() -> None:
    contract = OP.contract
    reworded = contract.model_copy(update={"summary": "said otherwise"})
    stricter = contract.model_copy(update={"name": "other"})
    assert contract.same_terms(reworded)
    assert not contract.same_terms(stricter)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('shape = ["tokens", "hidden"]', 'shape = ["tokns", "hidden"]', "a shape of input names"),
        ('shape = ["hidden"]', 'shape = ["hidden *"]', "a shape of weight is no arithmetic"),
        ('reduction = "hidden"', 'reduction = "heads"', "accuracy.reduction names heads"),
        ("multiple_of", "multiple_of", ""),
        ("{ hidden = { multiple_of", "{ width = { multiple_of", "a guard is of width"),
        ("{ tokens = 17, hidden =", "{ tokens = 17, width =", "of which hidden shape 2"),
    ],
)
def test_a_contract_that_names_what_has_no_size_is_refused(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    text = (bench.load_op("rms_norm").folder / "op.toml").read_text(encoding="utf-8")
    assert before in text
    (tmp_path / "op.toml").write_text(text.replace(before, after, 1), encoding="utf-8")
    if not said:
        assert Op(tmp_path).name == "rms_norm"
        return
    with pytest.raises(bench.UsageError, match="is not a valid contract") as raised:
        Op(tmp_path)
    assert said in raised.value.message


def test_points_that_came_after_a_contract_are_the_librarys_alone(tmp_path: Path) -> None:
    op = bench.load_op("linear")
    later = bench.later_points(op.folder)
    assert [(each.engine, each.point) for each in later] == [("transformers", "linear")]
    assert op.contract.patch_points[-1:] == later
    shutil.copytree(op.folder, tmp_path / "linear")
    copy = Op(tmp_path / "linear")
    assert copy.digest == op.digest, "a verdict does not depend on where a kernel may go"
    assert copy.contract.patch_points == op.contract.patch_points[:-1]


def test_points_that_came_later_are_of_ops_that_there_are() -> None:
    for name in ("fused_add_rms_norm", "linear", "moe_topk", "rope"):
        assert bench.later_points(bench.load_op(name).folder)
    known = {op.folder for op in bench.load_ops().values() if bench.later_points(op.folder)}
    assert {folder.name for folder in known} == set(points_by_op())
