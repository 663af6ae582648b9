"""Which op covers a kernel: by the parts of both, by the weights, and by the module."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from patcher.bench import content, load_ops
from patcher.hotspot import Gpu, Profile
from patcher.hotspot.coverage import (
    PLAIN,
    beside,
    by_role,
    by_symbols,
    costs,
    does_chain,
    parts_of,
    takes_weights,
)
from patcher.hotspot.rank import build_profile
from patcher.hotspot.recording import Launches, NamedSteps, Recording
from patcher.hotspot.roofline import ServedModel
from patcher.hotspot.rules import rules
from patcher.hotspot.step_bytes import step_bytes
from patcher.hotspot.step_ledger import step_ledger
from patcher.hotspot.step_record import KernelAnswer, StepLedger
from patcher.hotspot.step_roles import roles_of_step
from patcher.places import places_in

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "tests/data/nsys/qwen3_steps.json.xz"
FP8, DENSE = "qwen3-30b-a3b-fp8", "qwen3-8b"
BLOCKS = "fp8 in blocks"


@cache
def profile_of(model: str, batch: int) -> Profile:
    """Four times the usual step that vLLM 0.33.0 ran on an H200."""
    kept = json.loads(lzma.decompress(STEPS.read_bytes()))[f"{model}.{batch}"]
    duration = np.array(kept["duration_ns"], np.int64)
    start = np.cumsum(np.array(kept["gap_ns"], np.int64) + duration) - duration
    long = int((start + duration).max()) + 50_000
    starts = np.concatenate([start + number * long for number in range(4)])
    ends = starts + np.tile(duration, 4)
    count = len(starts)
    launches = Launches(
        texts=tuple(kept["names"]),
        name=np.tile(np.array(kept["kernel"], np.int32), 4),
        start=starts,
        end=ends,
        device=np.zeros(count, np.int32),
        stream=np.full(count, 7, np.int32),
    )
    bounds = np.array([[at * long, at * long + long - 50_000] for at in range(4)], np.int64)
    recording = Recording(
        "steps of Qwen3",
        launches=launches.in_order(),
        steps=NamedSteps(np.zeros(4, np.int32), bounds, ("decode",) * 4),
        gpu=Gpu(name="NVIDIA H200"),
    )
    served = ServedModel.of(model, batch, places_in(model, "vllm"))
    return build_profile(recording, model, served=served)


@cache
def ledger_of(model: str, batch: int) -> StepLedger:
    return step_ledger(
        profile_of(model, batch),
        step_bytes(model, batch, 1024),
        places=places_in(model, "vllm"),
    )


def answer(model: str, batch: int, *words: str) -> KernelAnswer:
    found = ledger_of(model, batch).kernels
    return next(each for each in found if all(word in each.name for word in words))


def untimed(op: str) -> str:
    return f"no kernel of op {op} was timed"


def ships(op: str) -> str:
    return f"a kernel of op {op} ships for it, and does not run here"


ANSWERS = [
    (FP8, 1, "fp8_blockwise", "out projection", untimed("linear_fp8")),
    (FP8, 8, "fp8_blockwise", "QKV projections", untimed("linear_fp8")),
    (FP8, 1, "fused_moe_kernel", "experts gate/up", untimed("moe_experts_fp8_block")),
    (FP8, 8, "moe_align_block_size", "routing, sum", untimed("moe_experts_fp8_block")),
    (FP8, 8, "moe_sum_vec_kernel", "routing, sum", untimed("moe_experts_fp8_block")),
    (FP8, 8, "silu_and_mul_per", "experts, small kernels", untimed("moe_experts_fp8_block")),
    (FP8, 8, "topkGating", "routing, sum", untimed("moe_topk")),
    (FP8, 8, "split_with_sizes", "rope, KV write", ships("qk_norm_rope")),
    (FP8, 8, "reshape_and_cache", "rope, KV write", ships("rope_kv_update")),
    (FP8, 8, "fused_add_rms_norm_moe", "norms, residual", ships("fused_add_rms_norm")),
    (FP8, 8, "nvjet_sm90_tst_8x64", "router", ships("linear")),
    (
        FP8,
        8,
        "rms_norm_per_block_quant",
        "norms, residual",
        "no op of the library does all of it: add, norm, quantisation",
    ),
    (DENSE, 64, "split_with_sizes", "rope, KV write", ships("qk_norm_rope")),
    (DENSE, 64, "fused_add_rms_norm_2", "norms, residual", ships("fused_add_rms_norm")),
    (DENSE, 64, "mul_silu", "activation", ships("silu_and_mul")),
    (DENSE, 64, "splitK_TNN", "MLP down", ships("linear")),
    (DENSE, 64, "FlashAttnFwdSm90", "attention", ships("decode_attention")),
]


@pytest.mark.parametrize(("model", "batch", "kernel", "role", "reason"), ANSWERS)
def test_kernels_of_a_step_are_answered_by_what_covers_them(
    model: str, batch: int, kernel: str, role: str, reason: str
) -> None:
    found = answer(model, batch, kernel)
    assert role in found.roles
    assert found.faster_reason.endswith(reason)
    assert found.faster == ("yes" if "ships" in reason else "untried")


def test_the_same_kernel_has_the_op_of_each_module_that_launched_it() -> None:
    both = answer(FP8, 1, "per_token_group_quant")
    assert both.roles == ("experts, small kernels", "quantisation")
    assert both.faster_reason == (
        "experts, small kernels: engine source, and no kernel of op moe_experts_fp8_block was "
        "timed; quantisation: engine source, and no kernel of op quantize_fp8 was timed"
    )
    rows, columns = (
        answer(FP8, 8, f"c10::Float8_e4m3fn, (bool){by}, (bool)0, (int)128>(const T1 *, void *")
        for by in (0, 1)
    )
    assert rows.faster_reason.endswith(untimed("moe_experts_fp8_block"))
    assert columns.faster_reason.endswith(
        f"{untimed('quantize_fp8')}; it takes scales column by column only beside op linear_fp8"
    )


def published(folder: str, name: str, batch: int | None = None) -> dict[str, KernelAnswer]:
    """The kernels of a published ledger, answered anew."""
    kept = json.loads(content(ROOT / "bench/results" / folder / f"ledger-{name}.json.xz"))
    found = kept
    if batch is not None:
        found = next(one["profile"] for one in kept["profiles"] if one["batch"] == batch)
    profile = Profile.model_validate(found)
    assert profile.ledger is not None
    counted = step_bytes(profile.model, profile.ledger.batch, profile.ledger.context)
    made = step_ledger(profile, counted, places=places_in(profile.model, "vllm"))
    assert made.sol_pct == pytest.approx(profile.ledger.sol_pct)
    return {kernel.name: kernel for kernel in made.kernels}


def test_a_kernel_that_is_near_its_floor_in_one_role_only_is_told_apart() -> None:
    found = answer(FP8, 8, "fused_moe_kernel")
    assert (found.faster, found.faster_reason) == ("no", "at 84 % of the floor")
    both = published("h100-vllm-0.33", "qwen3-8b.1")[
        "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT"
    ]
    assert both.faster == "yes"
    assert both.faster_reason == (
        f"MLP down: at 87 % of the floor; out projection: at 70 % of the floor: {ships('linear')}"
    )


def test_a_hybrids_norms_and_experts_are_not_what_their_names_begin_with() -> None:
    found = published("h200-vllm-0.33", "granite-4.0-h-tiny", 8)
    why = {
        name: each.faster_reason.partition("floor: ")[2] or each.faster_reason
        for name, each in found.items()
    }

    def said(words: str) -> str:
        return next(reason for name, reason in why.items() if words in name)

    whole = "generated by Inductor, and no op of the library does all of it: "
    assert said("rsqrt_silu_0") == f"{whole}activation, add, norm"
    assert said("add_mul_rms_norm_3") == f"{whole}add, norm, scaling"
    for kernel in ("fused_moe_kernel", "act_and_mul", "moe_sum"):
        assert said(kernel).endswith(untimed("moe_experts"))
    assert said("topkGating").endswith(untimed("moe_topk"))
    assert said("_selective_scan_update_kernel").endswith(untimed("mamba2_decode"))


def test_the_first_projection_of_a_step_is_one_though_attention_was_planned_before_it() -> None:
    launches = {row.role: row.launches for row in ledger_of(DENSE, 64).roles}
    assert (launches["attention.in"], launches["attention.out"]) == (36, 36)
    assert launches["norms"] == 2 * 36 + 1, "those of heads are none of them"


def test_no_op_does_a_chain_that_has_more_parts_than_it() -> None:
    for model, batch in ((FP8, 1), (FP8, 8), (DENSE, 64)):
        chains = {spot.name: spot for spot in profile_of(model, batch).hotspots if spot.gap_ns}
        assert chains["norm + rope + KV write"].as_one is None
        assert all(chain.as_one is None for chain in chains.values())
        said = answer(model, batch, "reshape_and_cache")
        assert (said.fusible, said.in_chain) == ("untried", True)
        assert said.fusible_reason == "norm + rope + KV write: a chain, of which no op does all"


def test_rows_of_the_ranking_claim_what_the_ledger_claims() -> None:
    spots = {spot.name: spot for spot in profile_of(FP8, 8).hotspots}

    def row(words: str) -> tuple[str | None, str | None, str]:
        spot = next(spot for name, spot in spots.items() if words in name)
        return spot.op, spot.instead, spot.reason

    op, instead, reason = row("fp8_blockwise")
    assert (op, instead) == (None, "linear_fp8")
    assert reason == "a patch point of op linear_fp8 takes its place (vllm: linear_fp8)"
    for words in ("fused_moe_kernel", "moe_align", "moe_sum_vec", "silu_and_mul_per_block"):
        op, instead, reason = row(words)
        assert (op, instead) == (None, "moe_experts_fp8_block"), words
        assert "(vllm: experts.fp8_block)" in reason
    assert row("topkGating")[0] == "moe_topk"
    assert row("(bool)1, (bool)0, (int)128>(const T1 *, void *")[0] == "quantize_fp8"
    assert row("(bool)0, (bool)0, (int)128>(const T1 *, void *")[0] is None, "of the experts"
    assert row("(bool)1, (bool)1, (int)128>")[0] is None, "it adds a residual"
    router = next(spot for spot in spots.values() if spot.name.startswith("nvjet_sm90_tst_8x64"))
    assert router.triage == "closed"


def test_a_launch_that_is_a_part_of_an_op_has_not_the_cost_of_the_op() -> None:
    for spot in profile_of(DENSE, 64).hotspots:
        if "FlashAttnFwdSm90" in spot.name:
            assert spot.cost_source == "op decode_attention"
        elif "FlashAttnFwdCombine" in spot.name or "reshape_and_cache" in spot.name:
            assert (spot.op is not None, spot.cost_source) == (True, None)


FLASH = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<(int)2, cute::tuple<cute::C<(int)64>>, (int)64, "
    "cutlass::{}, float, cutlass::arch::Sm90, (bool)0>, flash::CollectiveEpilogueFwd<"
    "cute::tuple<cute::C<(int)64>>, cutlass::bfloat16_t>>>>(T1::Params)"
)
FLASHINFER = (
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2, 4, 8, "
    "flashinfer::BatchDecodeParams<__nv_bfloat16, {}, __nv_bfloat16, int>>"
)
CACHES = [
    (FLASH.format("bfloat16_t"), "decode_attention"),
    (FLASH.format("float_e4m3_t"), "decode_attention_fp8"),
    (FLASHINFER.format("__nv_bfloat16"), "decode_attention"),
    (FLASHINFER.format("__nv_fp8_e4m3"), "decode_attention_fp8"),
    ("fmhaSm100fKernel_QkvBfloat16OBfloat16H64PagedKvCausalVarSeq", "decode_attention"),
    ("fmhaSm100fKernel_QkvE4m3OBfloat16H64PagedKvCausalVarSeq", "decode_attention_fp8"),
    ("fmhaSm100aKernel_QBfloat16KvE4m3OBfloat16H128PagedKvDense", "decode_attention_fp8"),
    # their names do not tell
    ("kernel_unified_attention", "decode_attention"),
    ("flash::prepare_varlen_num_blocks_kernel<1, true>", "decode_attention"),
    ("decode_attention_kernel", "decode_attention"),
    ("decode_attention_fp8_kernel", "decode_attention_fp8"),
]


@pytest.mark.parametrize(("kernel", "op"), CACHES)
def test_attention_is_that_of_the_cache_that_its_name_tells(kernel: str, op: str) -> None:
    assert [each.name for each in by_symbols(kernel, "attention")] == [op]
    assert [each.name for each in by_role(kernel, "attention")] == [op]


PARTS: list[tuple[str, set[str]]] = [
    ("vllm::rms_norm_per_block_quant_kernel<A, B, true, true, 128>", {"add", "norm"}),
    ("vllm::rms_norm_per_block_quant_kernel<A, B, false, true, 128>", {"norm"}),
    ("void vllm::fused_add_rms_norm_static_fp8_quant_kernel<A>", {"add", "norm"}),
    ("void flashinfer::norm::FusedAddRMSNormKernel<8>()", {"add", "norm"}),
    ("triton_red_fused_add_mul_rms_norm_3", {"add", "norm", "scaling"}),
    ("triton_red_fused_fused_add_rms_norm_moe_forward_0", {"add", "norm"}),
    ("triton_red_fused__to_copy_embedding_rms_norm_0", {"norm", "look-up of embeddings"}),
    ("vectorized_layer_norm_kernel", {"another norm"}),
    ("void vllm::moe::topkGating<8, 64, 4, 16, 32, int, float, 0>", {"top-k"}),
    ("topkGating<8, 64, 4, 16, 32, int, float, 1>", {"top-k by groups or a bias"}),
    ("masked_topk_sum_kernel_moe_sum", {"sum over experts"}),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>", {"activation"}),
    ("void cublasLt::splitKreduce_kernel<32, 16>", {"sum over splits of a matmul"}),
    ("reshape_and_cache_flash_kernel<A, unsigned char, 1>", {"KV write"}),
    ("_causal_conv1d_update_kernel", {"state in place of a cache"}),
    ("fusedQKNormRopeKernel<128>", {"norm", "rope"}),
    ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<int>>", set()),
]


@pytest.mark.parametrize(("kernel", "parts"), PARTS)
def test_the_parts_of_a_kernel_are_in_its_name(kernel: str, parts: set[str]) -> None:
    quantises = "quant" in kernel or "unsigned char" in kernel
    assert parts_of(kernel) == (parts | {"quantisation"} if quantises else parts)


def test_a_kernel_of_the_library_has_the_parts_of_its_op() -> None:
    kernel = "void fused_norm::row_kernel<__nv_bfloat16, 128>(int)"
    assert parts_of(kernel) == {"add", "norm"}
    assert does_chain("reduce_add_rms_norm", ["_reduce_grouped", kernel])
    assert not does_chain("fused_add_rms_norm", ["_reduce_grouped", kernel])


def _names(kernel: str, role: str) -> list[str]:
    return [op.name for op in by_role(kernel, role)]


def test_an_op_covers_a_kernel_of_all_its_parts_or_of_some_where_it_stands_for_several() -> None:
    assert _names("rms_norm_kernel", "norms") == ["rms_norm", "gemma_rms_norm"]
    assert _names("rms_norm_kernel", "rope_kv") == ["qk_norm_rope", "rms_norm", "gemma_rms_norm"]
    assert _names("triton_red_fused_fused_add_rms_norm_0", "norms") == ["fused_add_rms_norm"]
    experts = ["moe_experts_fp8_block", "moe_experts"]
    assert _names("moe_sum_kernel", "routing") == [*experts, "moe_reduce"]
    assert _names("grouped_topk_fused_kernel", "routing") == ["grouped_topk"]
    gating = "void vllm::moe::topkGating<8, 64, 4, 16, 32, int, float, {}>"
    routers = [_names(gating.format(scores), "routing") for scores in (0, 1, 2)]
    assert routers == [["moe_topk"], ["grouped_topk"], []]
    assert _names("_causal_conv1d_update_kernel", "attention") == []


def test_an_op_covers_only_what_its_module_launched() -> None:
    for kernel, op in (
        ("vllm::act_and_mul_kernel<A, &vllm::silu_kernel<A>>", "silu_and_mul"),
        ("per_token_group_quant_8bit_kernel<A>", "quantize_fp8"),
    ):
        assert [each.name for each in by_symbols(kernel)] == [op]
        assert [each.name for each in by_symbols(kernel, "activation")] == [op]
        assert by_symbols(kernel, "experts.small") == ()


def test_an_op_covers_only_weights_that_it_multiplies_by() -> None:
    plain, narrow = "nvjet_sm90_tst_64x8", "cutlass_3x_gemm_fp8_blockwise<bfloat16_t>"

    def taken(kernel: str, formats: Sequence[str]) -> list[str]:
        return [op for op in ("linear", "linear_fp8") if takes_weights(op, kernel, formats)]

    assert taken(plain, [PLAIN]) == ["linear"]
    assert taken(narrow, [BLOCKS]) == ["linear_fp8"]
    assert taken(plain, [PLAIN, BLOCKS]) == ["linear"]
    assert taken(narrow, [PLAIN, BLOCKS]) == ["linear_fp8"]
    assert taken(narrow, [PLAIN]) == [], "its name shows another format than the model's"
    assert taken("gptq_marlin::Marlin<int>", ["gptq, awq"]) == []
    assert taken("cutlass_scaled_mm_fp8", ["fp8"]) == [], "a scale for a whole tensor"
    assert takes_weights("fused_add_rms_norm", narrow, [BLOCKS])


def test_formats_of_a_models_roles_are_those_of_its_checkpoint() -> None:
    found = step_bytes(FP8, 1, 16).formats
    for role in ("attention.in", "attention.out", "experts.gate_up", "experts.down"):
        assert found[role] == {BLOCKS}
    assert found["router"] == found["head"] == {PLAIN}
    assert step_bytes("gpt-oss-20b", 1, 16).formats["experts.down"] == {"mxfp4"}
    assert set().union(*step_bytes(DENSE, 1, 16).formats.values()) == {PLAIN}


def test_an_op_is_not_named_for_sizes_that_its_kernels_need_not_take() -> None:
    profile = profile_of(DENSE, 64)
    many = step_bytes(DENSE, 65, 1024)
    found = step_ledger(profile, many, places=places_in(DENSE, "vllm"))
    down = next(one for one in found.kernels if "splitK_TNN" in one.name)
    assert "linear" not in down.faster_reason, "a closed library's kernel, which no op takes"
    assert down.faster == "no"
    experts = step_ledger(
        profile_of(FP8, 1), step_bytes(FP8, 65, 1024), places=places_in(FP8, "vllm")
    )
    sums = next(one for one in experts.kernels if "silu_and_mul_per" in one.name)
    assert (
        sums.faster_reason == "engine source, and op moe_experts_fp8_block is not for tokens of 65"
    )


def test_scales_by_columns_need_another_op_beside() -> None:
    kernel = "per_token_group_quant_8bit_register_kernel<A, B, {}, 0, 128>"
    assert beside("quantize_fp8", kernel.format(1)) == "linear_fp8"
    assert beside("quantize_fp8", kernel.format(0)) == ""
    assert beside("linear", kernel.format(1)) == ""


def test_costs_are_of_kernels_with_the_main_parts() -> None:
    assert costs("decode_attention", "FlashAttnFwdSm90<flash>")
    assert not costs("decode_attention", "FlashAttnFwdCombine<flash>")
    assert costs("fused_add_rms_norm", "module::LlamaRMSNorm.norm")
    assert not costs("rope_kv_update", "reshape_and_cache_flash_kernel<A, A, 0>")


MOE = ["rms_norm_kernel", "qkv_gemm", "rms_norm_kernel", "rotary_kernel", "flash_fwd_kernel"]
MOE += ["o_gemm", "rms_norm_kernel", "gate_gemm", "topk_softmax_kernel", "token_quant_kernel"]
MOE += ["fused_moe_kernel", "silu_and_mul_kernel", "fused_moe_kernel", "moe_sum_kernel"]
SHARED = ["token_quant_kernel", "up_gemm", "silu_and_mul_kernel", "down_gemm"]


def test_small_kernels_have_the_role_of_the_module_that_launched_them() -> None:
    roles = roles_of_step(
        [*MOE, *SHARED, *MOE, *SHARED, "rms_norm_kernel", "head_gemm"], True, True
    )
    first = dict(enumerate(roles[: len(MOE) + len(SHARED)]))
    assert [first[at] for at in (0, 2, 3, 6)] == ["norms", "rope_kv", "rope_kv", "norms"]
    assert [first[at] for at in (8, 9, 11, 13)] == [
        "routing",
        "experts.small",
        "experts.small",
        "routing",
    ]
    assert [first[at] for at in (14, 16)] == ["quantisation", "activation"], "of shared experts"


def test_a_norm_between_projections_is_none_of_heads() -> None:
    latent = [
        "rms_norm_kernel",
        "a_gemm",
        "rms_norm_kernel",
        "b_gemm",
        "flash_fwd_kernel",
        "o_gemm",
    ]
    layer = [*latent, "rms_norm_kernel", "up_gemm", "silu_and_mul_kernel", "down_gemm"]
    roles = roles_of_step([*layer, *layer, "rms_norm_kernel", "head_gemm"], False, False)
    assert roles[10:14] == ["norms", "attention.in", "norms", "attention.in"]


def test_the_tables_name_ops_of_the_library_and_all_of_them() -> None:
    covered = rules("coverage")["op"]
    assert set(covered) == set(load_ops())
    roles = {row["name"]: row for row in rules("roles")["role"]}
    for row in roles.values():
        assert set(row.get("ops", ())) <= set(covered)
        assert row.get("weights_of", "head") in roles
        modules = {covered[op].get("experts", False) for op in row.get("ops", ())}
        assert modules <= {row.get("experts", False)}
    known = {part["name"] for part in rules("coverage")["part"]}
    known |= {row["name"] for row in rules("families")["operation"]}
    assert all(set(row["parts"]) <= known for row in covered.values())
    formats = {row["name"] for row in rules("roles")["format"]}
    for row in covered.values():
        weights = row.get("weights", PLAIN)
        assert weights == PLAIN or weights.removesuffix(" in blocks") in formats
