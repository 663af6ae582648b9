"""Hotspots: rows that add up, ceilings, speed of light, triage, fusion chains, comparison."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from patcher import bench
from patcher.hotspot import Gpu, Hotspot, Profile, compare, ledger, read
from patcher.hotspot.chains import Chain, with_unique_names
from patcher.hotspot.profile import Counters
from patcher.hotspot.rank import build_profile
from patcher.hotspot.recording import Launches, Recording, SummaryRow
from patcher.hotspot.roofline import (
    LaunchCost,
    ServedModel,
    completed,
    cost_of,
    speed_of_light_ns,
)
from patcher.hotspot.rules import rules
from patcher.hotspot.subtract import subtract

EXPORT = Path(__file__).parents[1] / "data/nsys/decode.sqlite"
H200 = Gpu(
    name="NVIDIA H200",
    memory_bytes_per_s=4.8e12,
    multiprocessors=132,
    clock_hz=1.98e9,
    compute_capability="9.0",
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read(EXPORT, "gpt-oss-20b")


def rows(profile: Profile, kind: str) -> list[Hotspot]:
    return [spot for spot in profile.hotspots if spot.kind == kind]


def test_kernel_rows_add_up_to_the_busy_time(profile: Profile) -> None:
    kernels = rows(profile, "kernel")
    assert sum(spot.exposed_ns or 0 for spot in kernels) == profile.busy_ns
    assert sum(spot.share_pct for spot in kernels) == pytest.approx(100)
    assert sum(kernel.exposed_ns or 0 for kernel in profile.kernels) == profile.busy_ns
    assert profile.busy_ns is not None
    assert profile.busy_ns < profile.total_kernel_ns, "attention begins before its predecessor ends"


def test_busy_memory_and_idle_time_are_the_wall_time(profile: Profile) -> None:
    [idle] = rows(profile, "idle")
    assert profile.wall_ns == (profile.busy_ns or 0) + (profile.memory_ns or 0) + (
        idle.exposed_ns or 0
    )
    assert idle.wall_pct == pytest.approx(100 * (idle.exposed_ns or 0) / (profile.wall_ns or 1))


def test_the_ledger_covers_95_percent_and_adds_up(profile: Profile) -> None:
    entries = ledger(profile)
    assert sum(row.spent_ns for row in entries) == profile.busy_ns
    *named, rest = entries
    assert rest.rank is None
    assert named[-1].cumulative_pct >= 95 > named[-2].cumulative_pct
    assert all(row.reason for row in entries)


def test_every_row_says_what_to_do_and_why(profile: Profile) -> None:
    by_name = {spot.name: spot for spot in profile.hotspots}
    assert by_name["nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT"].triage == "closed"
    norm = by_name["triton_red_fused_fused_add_rms_norm"]
    assert (norm.triage, norm.op) == ("replace", "fused_add_rms_norm")
    assert norm.patch_points == (
        "transformers: gpt_oss.decoder_layer",
        "vllm: add_norm",
        "tensorrt_llm: flashinfer_fused_add_rmsnorm",
        "sglang: add_norm",
        "transformers: add_norm",
    )
    routing, small = by_name["_topk_forward"], by_name["triton_poi_fused_2"]
    assert (routing.triage, routing.op) == ("replace", "moe_route")
    assert small.triage == "fuse"
    assert "rope + KV write" in small.reason
    for spot in profile.hotspots:
        assert spot.reason
        assert "{" not in spot.reason
        if spot.kind == "kernel" and spot.ceiling_pct < 0.5:
            assert spot.triage == "leave"


def test_an_op_that_the_model_has_no_place_for_covers_nothing(profile: Profile) -> None:
    asked: list[str] = []

    def places(op: bench.Op) -> tuple[tuple[str, ...], str]:
        asked.append(op.name)
        return ((), "its norms multiply by 1 + w") if "norm" in op.name else (("vllm: here",), "")

    found = read(EXPORT, "gpt-oss-20b", places=places)
    by_name = {spot.name: spot for spot in found.hotspots}
    norm, routing = by_name["triton_red_fused_fused_add_rms_norm"], by_name["_topk_forward"]
    assert (norm.op, norm.patch_points, norm.bytes) == (None, (), None)
    assert norm.refusal == "fused_add_rms_norm: its norms multiply by 1 + w"
    assert "no patch point takes it in this model: fused_add_rms_norm: its norms" in norm.reason
    assert (routing.op, routing.patch_points) == ("moe_route", ("vllm: here",))
    chain = by_name["MoE combine + add + norm"]
    assert (chain.as_one, chain.refusal[:19]) == (None, "reduce_add_rms_norm")
    assert [s.exposed_ns for s in found.hotspots] == [s.exposed_ns for s in profile.hotspots]
    assert "fused_add_rms_norm" in asked


def test_families_fold_autotuned_names_and_list_them(profile: Profile) -> None:
    norm = next(s for s in profile.hotspots if s.name == "triton_red_fused_fused_add_rms_norm")
    assert {variant.name for variant in norm.variants} == {
        "triton_red_fused_fused_add_rms_norm_0",
        "triton_red_fused_fused_add_rms_norm_1",
    }
    assert sum(variant.instances for variant in norm.variants) == norm.instances
    assert (norm.per_step, norm.per_layer) == (48, 2)


def test_the_ceiling_is_amdahls(profile: Profile) -> None:
    for spot in profile.hotspots:
        share = (spot.exposed_ns or 0) / (profile.wall_ns or 1)
        assert spot.ceiling_pct == pytest.approx(100 * share / (1 - share))
        if spot.reachable_pct is not None:
            assert spot.reachable_pct <= spot.ceiling_pct


CHAINS = {
    "MoE routing": (24, 5),
    "rope + KV write": (24, 4),
    "MoE combine + add + norm": (23, 2),
    "split-K reduce + add + norm": (24, 2),
}
"""Runs a step, launches a run; counted by hand in the kernel sequence of the capture."""
AS_ONE = {
    "MoE routing": "moe_route",
    "rope + KV write": "rope_kv_update",
    "MoE combine + add + norm": "reduce_add_rms_norm",
}
"""The library's kernel for a whole chain."""


def test_fusion_chains_are_named_and_counted(profile: Profile) -> None:
    chains = {spot.name: spot for spot in rows(profile, "chain")}
    assert set(chains) == set(CHAINS)
    for name, (runs, length) in CHAINS.items():
        chain = chains[name]
        assert chain.per_step == runs
        assert sum(variant.instances for variant in chain.variants) == pytest.approx(
            chain.instances * length, rel=0.01
        )
        assert chain.triage == "fuse"
        assert chain.gap_ns > 0
        assert chain.op is None
        assert chain.as_one == AS_ONE.get(name)
        said = (
            f"op {chain.as_one} does this in one kernel"
            if chain.as_one
            else "one kernel could replace"
        )
        assert said in chain.reason
        assert bool(chain.patch_points) is bool(chain.as_one)


def test_what_is_a_chain_as_one_kernel_is_an_op_with_a_place() -> None:
    named = {rule["as_one"] for rule in rules("advice")["chain"] if "as_one" in rule}
    assert named == set(AS_ONE.values())
    for name in named:
        assert bench.load_op(name).contract.patch_points


def test_a_chain_is_its_launches_and_the_gaps_between_them(profile: Profile) -> None:
    """Against the drawn step, launch by launch."""
    step = sorted(profile.step, key=lambda launch: launch.start_ns)
    [routing] = [i for i, spot in enumerate(profile.hotspots) if spot.name == "MoE routing"]
    spent = gap = 0
    for before, launch in pairwise(step):
        if launch.chain == routing:
            spent += launch.duration_ns
            if before.chain == routing:
                gap += max(launch.start_ns - before.start_ns - before.duration_ns, 0)
    chain = profile.hotspots[routing]
    assert profile.steps is not None
    assert chain.gap_ns / profile.steps == pytest.approx(gap, rel=0.1)
    assert (chain.exposed_ns or 0) / profile.steps == pytest.approx(spent + gap, rel=0.05)


def test_speed_of_light_by_the_ops_own_bytes(profile: Profile) -> None:
    recording = Recording("a test", rows=(SummaryRow("fused_add_rms_norm", 48, 48 * 2_000),))
    [spot] = build_profile(
        Recording(**{**vars(recording), "gpu": H200}),
        "gpt-oss-20b",
        served=ServedModel.of("gpt-oss-20b"),
    ).hotspots
    bytes_moved = 4 * 8 * 2880 * 2 + 2880 * 2
    assert spot.cost_source == "op fused_add_rms_norm"
    assert spot.bytes == bytes_moved
    assert spot.speed_of_light_ns == pytest.approx(1e9 * bytes_moved / 4.8e12)
    assert spot.sol_pct == pytest.approx(100 * bytes_moved / 4.8e12 / 2e-6)


def test_speed_of_light_by_counters_and_by_arithmetic() -> None:
    recording = Recording("a test", rows=(SummaryRow("gemm", 10, 10 * 50_000),), gpu=H200)
    counters = {"gemm": Counters(launches=1, dram_bytes=120e6)}
    [spot] = build_profile(recording, "m", counters=counters).hotspots
    assert spot.cost_source == "ncu"
    assert spot.speed_of_light_ns == pytest.approx(25_000)
    assert spot.sol_pct == pytest.approx(50)
    # at 80 % of the speed of light 31.25 us of 50 are left: 37.5 % saved
    assert spot.reachable_pct == pytest.approx(100 * 0.375 / 0.625)
    peak = 4096 * 132 * 1.98e9
    assert speed_of_light_ns(LaunchCost(None, peak, "ncu"), H200) == pytest.approx(1e9)
    assert speed_of_light_ns(LaunchCost(None, peak, "ncu"), None) is None
    fast = build_profile(
        recording, "m", counters={"gemm": Counters(launches=1, dram_bytes=230e6)}
    ).hotspots[0]
    assert fast.triage == "leave"
    assert "speed of light" in fast.reason


def test_a_gpu_that_only_has_a_name_gets_its_data_sheet() -> None:
    known = completed(Gpu(name="NVIDIA H100 80GB HBM3"))
    assert known is not None
    assert known.memory_bytes_per_s == 3.35e12
    assert completed(Gpu(name="Voodoo2")) == Gpu(name="Voodoo2")


def test_two_devices_are_added_up() -> None:
    recording = Recording(
        "a test",
        launches=Launches(
            ("a", "b"),
            np.array([0, 1, 0], np.int32),
            np.array([0, 50, 60], np.int64),
            np.array([100, 150, 90], np.int64),
            np.array([0, 0, 1], np.int32),
            np.array([7, 8, 7], np.int32),
        ),
        memory=np.array([[0, 140, 170], [1, 65, 70]], np.int64),
    )
    profile = build_profile(recording, "m")
    assert profile.busy_ns == 150 + 30
    assert profile.memory_ns == 0, "what lies past the last kernel is not waited for"
    assert {kernel.name: kernel.exposed_ns for kernel in profile.kernels} == {"a": 130, "b": 50}


def test_the_difference_of_two_runs_is_steady_decode() -> None:
    def run(tokens: int) -> Recording:
        rows = (
            SummaryRow("load_weights", 300, 9_000_000),
            SummaryRow("void gemm<(int)1>(T1)", 24 * tokens, 24 * tokens * 9_000),
            SummaryRow("argmax", tokens, tokens * 4_000),
        )
        return Recording(f"{tokens} tokens", rows=rows)

    left = subtract(run(512), run(256))
    profile = build_profile(left, "m", steps=256)
    counts = {kernel.name: (kernel.instances, kernel.total_ns) for kernel in profile.kernels}
    assert counts == {
        "void gemm<(int)1>(T1)": (24 * 256, 24 * 256 * 9_000),
        "argmax": (256, 256 * 4_000),
    }
    assert profile.hotspots[0].per_step == 24
    with pytest.raises(bench.UsageError, match="does not hold more work"):
        subtract(run(256), run(512))


def patched(profile: Profile) -> Recording:
    """The same run with another norm kernel, a quarter faster."""
    recording = read_launches()
    assert recording.launches is not None
    launches = recording.launches
    texts = tuple(
        "patcher::fused_add_rms_norm_kernel" if "fused_add_rms_norm" in text else text
        for text in launches.texts
    )
    norm = np.array(["fused_add_rms_norm" in text for text in texts])[launches.name]
    end = np.where(norm, launches.end - (launches.end - launches.start) // 4, launches.end)
    moved = Launches(texts, launches.name, launches.start, end, launches.device, launches.stream)
    return Recording("patched run", launches=moved)


def read_launches() -> Recording:
    from patcher.hotspot.readers import read_recording

    return read_recording(EXPORT)


def test_a_comparison_says_whether_the_new_kernel_is_there_and_the_old_one_gone(
    profile: Profile,
) -> None:
    after = build_profile(patched(profile), "gpt-oss-20b")
    found = compare(profile, after)
    assert found.unit == "decode step"
    changes = {row.name: row.change for row in found.rows}
    assert changes["triton_red_fused_fused_add_rms_norm"] == "gone"
    assert changes["patcher::fused_add_rms_norm_kernel"] == "new"
    assert changes["_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1"] == "same"
    ops = {op.op: (op.patched, op.gone) for op in found.ops}
    assert ops.pop("fused_add_rms_norm") == (True, True)
    assert set(ops) == {
        *("moe_matmul_swiglu", "moe_matmul_down", "moe_reduce", "moe_route", "rope_kv_update"),
        *("decode_attention", "sample_argmax"),
    }
    assert set(ops.values()) == {(False, False)}
    assert {(op.patched, op.gone) for op in compare(profile, profile).ops} == {(False, False)}
    assert all(row.change == "same" for row in compare(profile, profile).rows)
    busy = found.after_busy_ns - found.before_busy_ns
    assert busy == pytest.approx(
        sum(row.delta_ns for row in found.rows if row.kind == "kernel"), rel=1e-6
    )


def test_every_row_is_compared(profile: Profile) -> None:
    """Chains are named in words, which spelling rules for kernels would run together."""
    assert len(compare(profile, profile).rows) == len({(s.kind, s.name) for s in profile.hotspots})
    assert sum(spot.kind == "chain" for spot in profile.hotspots) > 1


def test_chains_of_one_name_get_unique_names() -> None:
    named = [("norm", 2), ("norm", 3), ("norm", 3), ("rope", 2)]
    chains = [Chain(name, ((0, length), (9, 9 + length))) for name, length in named]
    assert [chain.name for chain in with_unique_names(chains)] == [
        "norm (2 launches)",
        "norm (3 launches), no. 1",
        "norm (3 launches), no. 2",
        "rope",
    ]


def test_an_op_covers_only_its_own_chain_and_only_models_it_fits() -> None:
    def op(name: str, model: str = "m") -> tuple[str | None, tuple[str, ...]]:
        recording = Recording("a test", rows=(SummaryRow(name, 48, 96_000),))
        [spot] = build_profile(recording, model).hotspots
        return spot.op, spot.patch_points

    norm = "triton_red_fused_add_all_reduce_mean_mul_pow_rsqrt_1"
    assert op(norm)[0] == "fused_add_rms_norm"
    assert op("triton_red_fused_add_mean_mul_pow_rsqrt_silu_1") == (None, ())
    assert op("triton_poi_fused_add_mean_mul_pow_rsqrt_1") == (None, ())
    assert op("triton_poi_fused_topk_softmax_1", "gpt-oss-20b") == (None, ())
    assert op("vllm::fused_add_rms_norm_static_fp8_quant_kernel") == (None, ())
    assert op("void flashinfer::norm::GemmaFusedAddRMSNormKernel<8>()") == (None, ())
    assert "transformers: gpt_oss.decoder_layer" in op(norm, "gpt-oss-20b")[1]
    assert not any("gpt_oss" in point for point in op(norm, "Qwen3-8B")[1])
    router = "void vllm::moe::topkGatingSoftmax<4>()"
    of_any = ("vllm: router.topk", "transformers: router")
    assert op(router, "Qwen3-30B-A3B") == ("moe_topk", of_any)
    assert "transformers: gpt_oss.router" in op(router, "gpt-oss-20b")[1]
    rotation = "void rope_kernel<128>()"
    assert op(rotation, "Qwen3-8B") == ("rope", ("transformers: rotation",))
    assert op(rotation, "gpt-oss-20b")[0] == "rope"


def test_an_op_moves_the_bytes_of_the_dtype_that_the_model_ran_in() -> None:
    op, served = bench.load_op("rms_norm"), ServedModel(axes={"tokens": 8, "hidden": 4096})
    costs = [
        cost_of(op, None, replace(served, dtype=dtype))
        for dtype in (None, "bfloat16", "float32", "int8")
    ]
    usual, same, wide, unknown = (cost.bytes for cost in costs if cost and cost.bytes)
    assert usual == same == unknown, "a dtype that no contract has changes nothing"
    assert wide == 2 * usual
