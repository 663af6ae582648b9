"""Ops of the library beside `fused_add_rms_norm`: contracts, references, inputs and solutions."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pytest
import torch
from op_judging import tells_right_from_wrong, wrong_with
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from patcher import bench
from patcher.bench import Language
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge.accuracy import explain_touched
from patcher.bench.judge.cases import (
    Case,
    Expected,
    expect,
    make_inputs,
    placements,
    scalars_by_name,
    tensors_of,
    value_problem,
)
from patcher.bench.judge.judge import Judge
from patcher.bench.judge.regimes import regimes_of
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op
from patcher.bench.runner.captured import Arena, Captured
from patcher.bench.runner.loading import load

NAMES = (
    "add_rms_norm_route",
    *("decode_attention", "decode_attention_fp8", "embed_norm", "gated_delta_decode"),
    *("gelu_and_mul", "gelu_tanh_and_mul"),
    *("gemma_rms_norm", "grouped_topk", "linear", "linear_fp8", "lm_head_argmax", "mamba2_decode"),
    "mla_decode",
    *("moe_block", "moe_experts", "moe_experts_fp8_block", "moe_finalize", "moe_reduce"),
    *("moe_route", "moe_topk"),
    *("qk_norm_rope", "qkv_rope_kv_update", "quantize_fp8", "reduce_add_rms_norm", "rms_norm"),
    "rms_norm_quant_fp8",
    *("rope", "rope_kv_update", "sample_argmax", "sample_top_k_top_p", "silu_and_mul"),
)
OPS = {name: bench.load_op(name) for name in NAMES}
SOLUTIONS = {
    (name, info.name): (candidate, next((op.folder / "solutions" / info.name).glob(f"{name}.*")))
    for name, op in OPS.items()
    for info, candidate in op.solutions()
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many small calls: threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hidden(op: Op, dtypes: dict[str, str]) -> list[Point]:
    return [Point(axes=shape.axes, dtypes=dtypes) for shape in op.contract.hidden]


def served(op: Op, point: Point, regime: str, seed: int) -> Case:
    """With the scalars that the sweeps use."""
    return Case(point, regime, seed, tuple(scalar.value for scalar in op.contract.scalars))


def problem(op: Op, case: Case) -> tuple[dict[str, Tensor], Expected]:
    values = make_inputs(op, case, "cpu")
    inputs = {tensor.name: values[tensor.name] for tensor in op.contract.tensors}
    return inputs, expect(op, case, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_seeded_and_fit_the_contract(name: str) -> None:
    op = OPS[name]
    for regime in op.inputs.REGIMES:
        for point in hidden(op, op.contract.dtype_choices()[-1]):
            once, again, other = (
                op.inputs.make(point, torch.Generator().manual_seed(seed), regime)
                for seed in (1, 1, 2)
            )
            for tensor in op.contract.tensors:
                value = once[tensor.name]
                assert value.shape == op.contract.shape(tensor, point)
                assert value.dtype is getattr(torch, point.dtypes[tensor.dtype])
                assert value.is_contiguous()
                assert value.equal(again[tensor.name]) or value.isnan().any()
            assert any(not once[key].equal(other[key]) for key in once)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_tell_the_axes(name: str) -> None:
    op = OPS[name]
    points = [
        *chain(*(s.points() for s in op.contract.sweeps)),
        *hidden(op, op.sweep("cpu").dtypes),
    ]
    for point in points:
        shapes = [op.contract.shape(tensor, point) for tensor in op.contract.tensors]
        found = op.contract.axes_of(shapes)
        assert next(iter(found)) == "tokens"
        assert found.items() <= point.axes.items()
        assert set(point.axes) - set(found) <= {"biased", "experts"}
        shapes[-1] = (shapes[-1][0] + 1, *shapes[-1][1:])
        if name != "rope_kv_update":  # how many blocks a cache has is nobody else's business
            with pytest.raises(ValueError, match=" is "):
                op.contract.axes_of(shapes)


@pytest.mark.parametrize("name", NAMES)
def test_the_torch_solution_is_right_in_every_regime_and_dtype(name: str) -> None:
    op = OPS[name]
    kernel = load(str(SOLUTIONS[name, "cpu_torch"][1]), "python", name)
    for index, dtypes in enumerate(op.contract.dtype_choices()):
        for number, point in enumerate(hidden(op, dtypes)):
            regimes = regimes_of(op)[(index + number) % 2 :: 2]
            for regime in ("normal", *regimes):
                case = served(op, point, regime, 10 * index + number)
                assert wrong_with(op, case, kernel) is None, case.label()


@pytest.mark.parametrize("name", [name for name in NAMES if placements(OPS[name])])
def test_the_torch_solution_is_right_at_every_placement(name: str) -> None:
    op = OPS[name]
    kernel = load(str(SOLUTIONS[name, "cpu_torch"][1]), "python", name)
    for number, placed in enumerate(placements(op)):
        for point in hidden(op, op.contract.dtype_choices()[-(number % 2)]):
            case = replace(served(op, point, "normal", number), placed=placed)
            assert wrong_with(op, case, kernel) is None, case.label()


def test_tensors_that_are_written_in_part_are_those_with_elements_that_stay() -> None:
    for name, op in bench.load_ops().items():
        inputs = make_inputs(op, served(op, op.sweep("cpu").points()[0], "normal", 1), "cpu")
        in_part = {tensor.name for tensor in op.contract.tensors if tensor.in_part}
        assert set(op.kept(**inputs)) == in_part, name


@pytest.mark.parametrize("name", NAMES)
def test_the_planted_control_is_told_from_the_honest_baseline(name: str) -> None:
    op = OPS[name]
    for sweep in op.contract.sweeps:
        if (name, sweep.device) == ("moe_block", "cuda"):  # experts too large for a CPU
            sweep = op.sweep("cpu").model_copy(update={"dtypes": sweep.dtypes})
        case = served(op, sweep.points()[:5][-1], "normal", 5)
        inputs, expected = problem(op, case)
        scalars = scalars_by_name(op, case)
        assert value_problem(op, [case], [expected], [op.control(**inputs, **scalars)]) is not None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "moe_topk"])
def test_gpu_baselines_say_why_they_do_not_run_here(name: str) -> None:
    anywhere = {"torch", "torch.compile", "eager", "transformers", "grouped_mm", "batched_mm"}
    for baseline in set(OPS[name].baselines) - anywhere:
        with pytest.raises(ImportError, match="CUDA device"):
            OPS[name].baselines[baseline]("cpu")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        (
            "moe_finalize",
            "void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<bf16, 1>",
        ),
        ("moe_reduce", "_reduce_grouped"),
        (
            "moe_reduce",
            "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<4>>",
        ),
        ("moe_route", "_topk_forward _sum_bitmatrix_rows _combined_routing_memset"),
        ("moe_route", "_combined_routing_compute_pow2"),
        ("decode_attention", "FlashAttnFwdCombine prepare_varlen_num_blocks"),
        (
            "gated_delta_decode",
            "fused_recurrent_gated_delta_rule_packed_decode_kernel gated_delta_decode_kernel",
        ),
        (
            "gelu_tanh_and_mul",
            "void vllm::act_and_mul_kernel<c10::BFloat16, "
            "&(c10::BFloat16 vllm::gelu_tanh_kernel<c10::BFloat16>(c10::BFloat16 const&)), true>",
        ),
        ("gelu_tanh_and_mul", "gelu_tanh_and_mul_kernel"),
        (
            "gelu_and_mul",
            "void vllm::act_and_mul_kernel<c10::Half, __half2, "
            "&(c10::Half vllm::gelu_kernel<c10::Half>(c10::Half const&, float)), true>",
        ),
        ("embed_norm", "embed_norm_kernel"),
        ("mla_decode", "sm90::decode::dense::flash_fwd_splitkv_mla_kernel<Traits>"),
        ("mla_decode", "BatchMLAPageAttentionHopperKernel flash_fwd_mla_combine_kernel"),
        (
            "grouped_topk",
            "void vllm::moe::grouped_topk_fused_kernel<float, float, int, "
            "(vllm::moe::ScoringFunc)1>(float*, float*, int*, float const*, long, long, long)",
        ),
        ("moe_experts_fp8_block", "moe_experts_fp8_block_kernel"),
        ("moe_experts", "moe_experts_kernel moe_experts_sum_kernel"),
        ("sample_top_k_top_p", "_topk_topp_kernel _topp_sb_step_kernel sample_top_k_top_p_kernel"),
        ("linear_fp8", "_w8a8_triton_block_scaled_mm _w8a8_block_fp8_matmul"),
        ("mamba2_decode", "_selective_scan_update_kernel"),
        (
            "quantize_fp8",
            "void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn>",
        ),
        (
            "rms_norm_quant_fp8",
            "void vllm::rms_norm_dynamic_per_token_quant_kernel<c10::BFloat16, "
            "c10::Float8_e4m3fn, false>",
        ),
        (
            "rms_norm_quant_fp8",
            "void vllm::rms_norm_per_block_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn, "
            "(bool)0, (bool)1, (int)128>",
        ),
        ("rms_norm_quant_fp8", "_helion_rms_norm_per_block_quant rms_norm_quant_fp8_kernel"),
        ("rope_kv_update", "vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>"),
        ("rope_kv_update", "applyBiasRopeUpdateKVCacheV2<__nv_bfloat16>"),
        (
            "qk_norm_rope",
            "void tensorrt_llm::kernels::fusedQKNormRopeKernel<bf16, bf16, 128, false>",
        ),
        ("qk_norm_rope", "fusedQKNormRopeKernelNTokenHeads fused_qknorm_rope_warp"),
        ("qk_norm_rope", "_helion_fused_qk_norm_rope qk_norm_rope_kernel"),
        (
            "sample_argmax",
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
            "at::native::ArgMaxOps<float>, unsigned int, long, 4, 4>>",
        ),
        ("sample_argmax", "aten::argmax sample_argmax_kernel"),
        ("lm_head_argmax", "lm_head_argmax_kernel lm_head_argmax_best_kernel"),
    ],
)
def test_symbols_are_those_of_one_op(name: str, kernels: str) -> None:
    spelled = [kernels] if kernels.startswith("v") else kernels.split()
    for kernel in spelled:
        assert [n for n, op in bench.load_ops().items() if op.contract.matches(kernel)] == [name]


@pytest.mark.parametrize("template", ["{}>", "{}, true, 128>", "{}, (bool)1, (int)128>"])
def test_a_norm_that_adds_a_residual_first_is_another_op(template: str) -> None:
    contract = OPS["rms_norm_quant_fp8"].contract
    kernel = "per_block" if "128" in template else "dynamic_per_token"
    name = f"vllm::rms_norm_{kernel}_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn, {template}"
    for adds in ("true", "(bool)1"):
        assert not contract.matches(name.format(adds))
    for only in ("false", "(bool)0"):
        assert contract.matches(name.format(only))


def test_a_norm_and_a_quantisation_in_turn_are_what_one_kernel_of_both_does() -> None:
    op = OPS["rms_norm_quant_fp8"]
    norm, quantise = (
        load(str(SOLUTIONS[name, "cpu_torch"][1]), "python", name)
        for name in ("rms_norm", "quantize_fp8")
    )

    def apart(
        input: Tensor, weight: Tensor, output: Tensor, scales: Tensor, epsilon: float
    ) -> None:
        normed = torch.empty_like(input)
        norm(input, weight, normed, epsilon)
        quantise(normed, output, scales)

    for dtypes in op.contract.dtype_choices():
        for number, point in enumerate(hidden(op, dtypes)):
            for regime in regimes_of(op):
                case = served(op, point, regime, number)
                assert wrong_with(op, case, apart) is None, case.label()


def test_what_sampling_decides_by_is_never_near() -> None:
    op = OPS["sample_top_k_top_p"]
    for seed, point in enumerate([*hidden(op, op.sweep("cpu").dtypes), *op.sweep("cpu").points()]):
        for regime in set(op.inputs.REGIMES) - {"ties"}:
            values = op.inputs.make(point, torch.Generator().manual_seed(seed), regime)
            rows = zip(*(values[name] for name in ("logits", "k", "p", "noise")), strict=True)
            for logits, k, p, noise in rows:
                found, order = logits.double().sort(descending=True)
                top = found[: int(k)]
                assert len(top) == len(found) or top[-1] > found[len(top)]
                mass = top.softmax(0)
                above = mass.cumsum(0) - mass
                assert p == 1 or (above - p).abs().min() > 1e-5
                scores = (mass / noise[order[: len(top)]])[(above < p) | (p == 1)].sort().values
                assert len(scores) == 1 or scores[-1] > 1.05 * scores[-2]


def test_of_tokens_that_tie_where_sampling_cuts_any_may_stay() -> None:
    op, tied = OPS["sample_top_k_top_p"], 0
    for seed, point in enumerate([*hidden(op, op.sweep("cpu").dtypes), *op.sweep("cpu").points()]):
        values = op.inputs.make(point, torch.Generator().manual_seed(seed), "ties")
        expected = op.reference(**values)["output"].tolist()
        rows = zip(*(values[name] for name in ("logits", "k", "p", "noise")), strict=True)
        for (logits, k, p, noise), answer in zip(rows, expected, strict=True):
            found, order = logits.double().sort(descending=True)
            # as many as k, or all that reach it; of these as many as p takes, or all like the last
            for top in (found[: int(k)], found[found >= found[int(k) - 1]]):
                mass = top.softmax(0)
                few = top[(mass.cumsum(0) - mass < p) | (p == 1)]
                tied += int(len(few) < len(found) and few[-1] == found[len(few)])
                for stays in (few, top[top >= few[-1]]):
                    scores = stays.exp() / noise[order[: len(stays)]]
                    best = scores.sort().values
                    assert order[scores.argmax()] == answer
                    assert len(best) == 1 or best[-1] > 1.05 * best[-2]
    assert tied > 20


ROUTE = Point(axes={"tokens": 2, "experts": 4, "top_k": 2}, dtypes={"T": "float32", "I": "int32"})


def test_ties_go_to_the_smaller_expert_and_bits_decide() -> None:
    op = OPS["moe_route"]
    inputs, _ = problem(op, Case(ROUTE, "normal", 1, ()))
    inputs["logits"] = torch.tensor([[1.0, 2.0, 2.0, 2.0], [-0.0, -1.0, 0.0, float("nan")]])
    found = op.reference(**inputs)
    # gates: token 0 takes experts 1, 2; token 1 takes 2 (0 is above -0) and 3 (NaN is above all)
    assert found["histogram"].tolist() == [0, 1, 2, 1]
    assert found["gather_index"].tolist() == [0, 1, 2, 3]
    assert found["tile_map"][0].tolist() == [1, 2, 3, -1]
    assert found["gate_scales"][:2].tolist() == [0.5, 0.5]


def test_what_an_update_leaves_alone_is_held_to_its_bits() -> None:
    op = OPS["rope_kv_update"]
    point = hidden(op, op.contract.dtype_choices()[0])[1]
    case = Case(point, "padding", 3, ())
    kernel = load(str(SOLUTIONS[op.name, "cpu_torch"][1]), "python", op.name)

    def careless(*tensors: Tensor) -> None:
        kernel(*tensors)
        stays = op.kept(slots=tensors[6], key_cache=tensors[7], value_cache=tensors[8])["key_cache"]
        first = stays.flatten().nonzero()[0]
        cache = tensors[7].view(-1).view(torch.int16)
        cache[first] ^= 1  # one bit, less than what rounding may cost

    assert wrong_with(op, case, kernel) is None
    said = wrong_with(op, case, careless)
    assert said is not None
    assert "changed elements that must stay unchanged at 1 of" in said


def test_not_a_number_that_stays_has_stayed() -> None:
    before = torch.tensor([float("nan"), -0.0, 1.0])
    kept = torch.tensor([True, True, False])
    assert explain_touched(torch.tensor([float("nan"), -0.0, 2.0]), before, kept) is None
    assert explain_touched(torch.tensor([float("nan"), 0.0, 1.0]), before, kept) is not None


def test_an_absent_tensor_has_a_place_without_bytes() -> None:
    op = OPS["moe_finalize"]
    point = hidden(op, op.contract.dtype_choices()[0])[0]
    plan = tensors_of(op, point)
    [slot] = [slot for slot in plan.slots if slot.name == "bias"]
    assert (slot.shape, slot.span_bytes) == ((0, 384), 0)


SETTINGS = JudgeSettings(
    baseline="eager", pairs=3, points=2, threads=1, calls=40, lives_s=0.0, timeout_s=20
)
WRONG = {
    # the experts of the greatest sums before the bias
    "add_rms_norm_route": ("bits = logits.float()", "bits = sums"),
    # one token more than the window has
    "decode_attention": ("length - int(window)", "length - int(window) - 1"),
    # values with the scale of keys
    "decode_attention_fp8": ("@ values * v_scale", "@ values * k_scale"),
    # what the state held before it decayed
    "gated_delta_decode": ("(value - (now * k)", "(value - (held.float() * k)"),
    # the approximation by tanh
    "gelu_and_mul": ("gelu(gate.float())", 'gelu(gate.float(), approximate="tanh")'),
    # the activation by the error function
    "gelu_tanh_and_mul": ('approximate="tanh"', 'approximate="none"'),
    # the weight is not an offset from one
    "gemma_rms_norm": ("(1.0 + weight.float())", "weight.float()"),
    # the bias is in the weights, too
    "grouped_topk": ("picked = scores.gather", "picked = values.gather"),
    # without the gain
    "embed_norm": ("wide * scale * weight.float()", "wide * scale"),
    # the rotated part is a key alone
    "mla_decode": ("rows[:, : out.shape[2]]", "rows[:, -out.shape[2] :]"),
    # the norm that follows the block has the gain of the one before
    "moe_block": ("normed(stream, next_weight,", "normed(stream, weight,"),
    # the activation of the other half
    "moe_experts": ("silu(gate) * up", "silu(up) * gate"),
    # no expert is the last one
    "moe_experts_fp8_block": ("ids[ids >= 0].unique()", "ids.unique()"),
    # one token fewer
    "sample_top_k_top_p": (
        "above = probabilities.cumsum(1) - probabilities",
        "above = probabilities.cumsum(1)",
    ),
    # the last output has another's bias
    "linear": ("bias.float()", "bias.roll(1).float()"),
    # a matmul that rounds what it is given
    "lm_head_argmax": ("x.float() @ weight.float().T", "x.bfloat16() @ weight.bfloat16().T"),
    # the scale of the block of outputs before
    "linear_fp8": ("scale = weight_scale.", "scale = weight_scale.roll(1, 0)."),
    # padding reads and writes the state of slot 0
    "mamba2_decode": ("if slot:", "if slot >= 0:"),
    # the bias of another expert
    "moe_finalize": ("experts[:, k]", "experts[:, 0]"),
    # a row that is skipped may hold NaN
    "moe_reduce": (
        "term.masked_fill((chosen < 0).unsqueeze(1), 0.0)",
        "term * (chosen >= 0).unsqueeze(1)",
    ),
    # the rest of the tile map is what it was
    "moe_route": ("tile_map.fill_(-1)", "pass"),
    # the softmax over all experts
    "moe_topk": ("order.values[:, :top_k].float(), 1)", "order.values.float(), 1)[:, :top_k]"),
    # the norm of the whole row
    "qk_norm_rope": ("heads.pow(2).mean(-1, keepdim", "heads.pow(2).mean((1, 2), keepdim"),
    # the values' weight for keys, too
    "qkv_rope_kv_update": ("turned[:, -kv_heads:][there]", "heads[:, -kv_heads:][there]"),
    # the largest of another fp8
    "quantize_fp8": ("numbers.clamp(-448.0, 448.0)", "numbers.clamp(-240.0, 240.0)"),
    # a row that is skipped may hold NaN
    "reduce_add_rms_norm": (
        "term.masked_fill((chosen < 0).unsqueeze(1), 0.0)",
        "term * (chosen >= 0).unsqueeze(1)",
    ),
    # not squared
    "rms_norm": ("wide.pow(2).mean", "wide.abs().mean"),
    # zeros over a scale of zero
    "rms_norm_quant_fp8": (".clamp_min(1.0 / (448.0 * 512.0))", ""),
    # turned the other way
    "rope": ("second * cos + first * sin", "second * cos - first * sin"),
    # padding is written to the last place
    "rope_kv_update": ("there = slots >= 0", "there = slots >= -1"),
    # of equal logits the last
    "sample_argmax": (
        "torch.argmax(logits, 1, out=output)",
        "output.copy_(logits.shape[1] - 1 - logits.flip(1).argmax(1))",
    ),
    # the activation of the other half
    "silu_and_mul": ("silu(gate.float()) * up.float()", "silu(up.float()) * gate.float()"),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with open_judge(SETTINGS) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_the_judge_takes_the_right_one_and_says_what_is_wrong_with_another(
    name: str, judge: Judge
) -> None:
    tells_right_from_wrong(judge, name, SOLUTIONS[name, "cpu_torch"][0].source, WRONG[name])


TRITON = [key for key, (found, _) in SOLUTIONS.items() if found.language is Language.TRITON]


@pytest.mark.parametrize(("name", "solution"), TRITON)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
def test_the_triton_solutions_are_right_in_the_interpreter(name: str, solution: str) -> None:
    # in a process of its own: Triton reads the variable when it is imported
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, __file__, name, solution],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == []


def interpreted(name: str, solution: str) -> list[str]:
    """What is wrong with a Triton solution. Not in bfloat16, which the interpreter truncates; fp8
    is written as float32 and rounded here, since it rounds to half or double at times.
    """
    op, found = OPS[name], []
    kernel = load(str(SOLUTIONS[name, solution][1]), "python", name)

    def widened(*arguments: Any) -> None:
        wide = [
            each.float() if tensor.access == "write" and "float8" in str(each.dtype) else each
            for tensor, each in zip(op.contract.tensors, arguments, strict=False)
        ]
        kernel(*wide, *arguments[len(wide) :])
        for each, result in zip(arguments, wide, strict=False):
            if each is not result:
                each.copy_(result)

    for turn, dtypes in enumerate(op.contract.dtype_choices()):
        if "bfloat16" in dtypes.values():
            continue
        ways = ["plain", *placements(op)]
        for number, point in enumerate(hidden(op, dtypes)):
            few = {"hidden": 640, "q_heads": 12, "heads": 20, "tokens": 8}  # it is slow
            small = {axis: min(size, few.get(axis, size)) for axis, size in point.axes.items()}
            point = point.model_copy(update={"axes": small})
            regime = op.inputs.REGIMES[number % len(op.inputs.REGIMES)]
            placed = ways[(turn + number) % len(ways)]
            case = replace(served(op, point, regime, number), placed=placed)
            if said := wrong_with(op, case, widened):
                found.append(f"{case.label()}: {said}")
    return found


if __name__ == "__main__":
    print(json.dumps(interpreted(*sys.argv[1:])))


@pytest.mark.parametrize("name", sorted(bench.load_ops()))
def test_the_yardstick_waits_for_nothing(name: str) -> None:
    """It is captured in CUDA graphs: no size or index may be read back by the host."""
    op = bench.load_op(name)
    case = served(op, op.sweep("cpu").points()[0], "normal", 1)
    inputs = make_inputs(op, case, "cpu")
    run = op.baselines[op.accuracy_baseline]("cpu")
    with FakeTensorMode() as fake:  # raises where a value is asked for
        run(*map(fake.from_tensor, inputs.values()), *case.scalars)


def test_another_sets_values_are_lent_but_for_weights() -> None:
    """What a dependent launch may see before it waits; see `Captured.follow`."""
    op = OPS["linear"]
    point = hidden(op, op.contract.dtype_choices()[-1])[0]
    plan = tensors_of(op, point)
    assert [slot.name for slot in plan.slots if slot.constant] == ["weight", "bias"]

    class Cuda:
        """Copies on the host."""

        @staticmethod
        def copy_async(target: int, source: int, size: int, stream: Any) -> None:
            ctypes.memmove(target, source, size)

    lent = object.__new__(Captured)
    arenas = [Arena(plan.model_dump(mode="json"), 2, "cpu") for _ in range(2)]
    lent.arena, lent.snapshot = arenas
    lent.cuda, lent.stream = Cuda(), None
    for index in range(2):
        for tensor in lent.arena.arguments[index]:
            tensor.fill_(index + 1)
    lent._lend(1, 0)
    assert [float(each.mean()) for each in lent.arena.arguments[1]] == [1, 2, 2, 1]
    assert [float(each.mean()) for each in lent.snapshot.arguments[1]] == [2, 2, 2, 2]
