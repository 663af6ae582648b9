"""The bytes of a step, the roles of its launches, and its ledger against the floor."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from patcher.bench import Op, UsageError, content
from patcher.bench.judge.ceilings import METHOD
from patcher.hotspot import Gpu, Profile, read
from patcher.hotspot.rank import build_profile
from patcher.hotspot.recording import Recording, SummaryRow
from patcher.hotspot.roofline import copy_rate
from patcher.hotspot.rules import rules
from patcher.hotspot.shipped import op_of_kernel
from patcher.hotspot.step_bytes import StepBytes, step_bytes
from patcher.hotspot.step_ledger import step_ledger
from patcher.hotspot.step_record import StepLedger
from patcher.hotspot.step_roles import roles_of_step
from patcher.places import places_in

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/nsys"
MODEL = "gpt-oss-20b"
HYBRID = "ledger-granite-4.0-h-tiny"


@pytest.fixture(scope="module")
def counted() -> StepBytes:
    return step_bytes(MODEL, 8, 1024)


@pytest.fixture(scope="module")
def ledger(counted: StepBytes) -> StepLedger:
    profile = read(DATA / "decode.sqlite", MODEL, places=places_in(MODEL))
    return step_ledger(profile, counted, gpu="H200", places=places_in(MODEL))


def role_bytes(model: str, batch: int = 8, context: int = 1024, **more: Any) -> dict[str, float]:
    found = step_bytes(model, batch, context, **more)
    return {name: role.weights + role.kv for name, role in found.roles.items()}


@pytest.mark.parametrize(
    ("batch", "h100_ms", "h200_ms"), [(1, 1.23, 0.86), (8, 3.1, 2.2), (64, 4.8, 3.4)]
)
def test_floors_of_gpt_oss_are_those_counted_by_hand(
    batch: int, h100_ms: float, h200_ms: float
) -> None:
    total = sum(role_bytes(MODEL, batch).values())
    for gpu, expected in (("NVIDIA H100 80GB HBM3", h100_ms), ("NVIDIA H200", h200_ms)):
        rate = copy_rate(Gpu(name=gpu))
        assert rate is not None
        assert 1e3 * total / rate.bytes_per_s == pytest.approx(expected, rel=0.02)


def test_what_is_not_quantised_has_the_bytes_of_the_dtype_that_it_ran_in() -> None:
    as_published, float32 = role_bytes(MODEL), role_bytes(MODEL, dtype="float32")
    assert role_bytes(MODEL, dtype="float16") == as_published
    assert float32["head"] == 2 * as_published["head"]
    assert float32["attention"] == 2 * as_published["attention"]
    assert float32["experts.down"] < 1.1 * as_published["experts.down"], "mxfp4 but for biases"


def test_each_role_of_gpt_oss_has_its_own_bytes(counted: StepBytes) -> None:
    """24 layers of 32 experts, of which a token goes to 4; 8 key heads of 64; window of 128."""
    distinct = 32 * (1 - (1 - 4 / 32) ** 8)
    assert counted.distinct_experts == pytest.approx(distinct)
    codes = 24 * distinct * 2880 * 2880 * 4.25 / 8
    biases = 24 * distinct * 2880 * 2
    roles = counted.roles
    assert roles["experts.down"].weights == pytest.approx(codes + biases)
    assert roles["experts.gate_up"].weights == pytest.approx(2 * (codes + biases))
    assert roles["head"].weights == 201_088 * 2880 * 2
    assert roles["attention.in"].weights == 24 * 2 * (5120 * 2881 + 64)
    assert roles["attention"].kv == 8 * 12 * (1024 + 128) * 2 * 8 * 64 * 2
    assert roles["rope_kv"].kv == 8 * 24 * 2 * 8 * 64 * 2
    assert roles["attention"].flops == 8 * 12 * (1024 + 128) * 4 * 64 * 64
    assert roles["experts.down"].flops == 2 * 8 * 24 * 4 * 2880 * 2880


def test_weights_of_an_engine_without_the_checkpoints_format_are_wider() -> None:
    wide, packed = role_bytes(MODEL, quantised=False), role_bytes(MODEL)
    assert wide["experts.down"] / packed["experts.down"] == pytest.approx(16 / 4.25, rel=0.01)
    assert wide["head"] == packed["head"]


def test_a_dense_model_reads_all_its_weights_and_shares_keys_by_groups() -> None:
    found = role_bytes("llama-3.1-8b")
    assert found["mlp.gate_up"] == 32 * 2 * 2 * 4096 * 14336
    assert found["attention"] == 8 * 32 * 1024 * 2 * 8 * 128 * 2
    assert not {"experts.down", "router", "shared"} & set(found)
    embedding = 128_256 * 4096 * 2
    read_once = sum(found.values()) - found["attention"] - found["rope_kv"] - found["embedding"]
    assert read_once == pytest.approx(8.0303e9 * 2 - embedding, rel=1e-3)


def test_windows_latent_attention_tied_heads_and_shared_experts_are_counted() -> None:
    gemma = role_bytes("gemma-3-27b", context=4096)
    assert gemma["attention"] == 8 * (52 * 1024 + 10 * 4096) * 2 * 16 * 128 * 2
    assert gemma["head"] == 262_208 * 5376 * 2  # it is the embedding
    deepseek = role_bytes("deepseek-v3-cut")
    assert deepseek["attention"] == 8 * 6 * 1024 * (512 + 64) * 2
    bits = 8 + 32 / (128 * 128)
    assert deepseek["shared"] == pytest.approx(3 * 3 * 7168 * 2048 * bits / 8)
    assert deepseek["router"] == 3 * 256 * 7168 * 2


STATES = [
    # Mamba2: heads of d_head by d_state, and three inputs of the convolution over x, B and C
    ("granite-4.0-h-tiny", 36, (48 * 64 * 128 + 3 * (48 * 64 + 2 * 128)) * 2),
    ("qwen3-next-80b-a3b", 36, (32 * 128 * 128 + 3 * (32 * 128 + 2 * 16 * 128)) * 2),
    ("kimi-linear-48b-a3b", 20, 32 * 128 * 128 * 4 + 3 * (3 * 32 * 128) * 2),
]


@pytest.mark.parametrize(("model", "layers", "size"), STATES)
def test_a_state_in_place_of_a_cache_is_read_and_written(
    model: str, layers: int, size: int
) -> None:
    counted = [step_bytes(model, 8, context) for context in (0, 1024)]
    assert [each.missing for each in counted] == [(), ()]
    assert counted[0].roles["attention"].kv == 2 * 8 * layers * size
    assert counted[1].roles["attention"].kv > counted[0].roles["attention"].kv


def test_a_layer_may_have_a_cache_and_a_state(tmp_path: Path) -> None:
    config = {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "vocab_size": 96,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    state, cache = 4 * 16 * 8 + 3 * (4 * 16 + 2 * 8), 2 * 2 * 16 * 100
    found = step_bytes(str(tmp_path), 1, 100)
    assert found.roles["attention"].kv == 2 * (2 * state + cache) * 2
    assert found.missing == ()


def test_what_is_not_counted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    known = rules("roles")
    monkeypatch.setattr("patcher.hotspot.step_bytes.rules", lambda _: {**known, "state": []})
    assert step_bytes("qwen3-next-80b-a3b", 8, 1024).missing == (
        "36 layers keep a state in place of a KV cache, and its bytes are not counted",
    )


def _folder(tmp_path: Path, quantisation: dict[str, Any]) -> str:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
        "quantization_config": quantisation,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "fp8"}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
                "ignore": ["lm_head", "re:.*self_attn.*"],
            },
            4.5,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ],
)
def test_formats_of_checkpoints_have_their_bits(
    quantisation: dict[str, Any], bits: float, tmp_path: Path
) -> None:
    found = role_bytes(_folder(tmp_path, quantisation), 1, 16)
    assert found["mlp.down"] == pytest.approx(2 * 64 * 128 * bits / 8)
    assert found["head"] == 100 * 64 * 2
    kept = "ignore" in quantisation
    assert found["attention.out"] == pytest.approx(2 * 64 * 64 * (2 if kept else bits / 8))


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"quant_method": "seven_bit"})
    with pytest.raises(UsageError, match="their format is 'seven_bit'"):
        step_bytes(folder, 1, 16)


def test_matmuls_have_the_role_of_their_place(ledger: StepLedger) -> None:
    launches = {row.role: round(row.launches) for row in ledger.roles}
    assert launches["attention.in"] == 24
    assert launches["experts.gate_up"] == launches["experts.down"] == 24
    assert launches["head"] == 1
    assert launches["norms"] == 49
    assert launches["attention.out"] + launches["router"] == 96, "each with its split-K sum"


LAYER = ["rms_norm_kernel", "qkv_gemm", "rotary_kernel", "flash_fwd_kernel", "o_gemm"]
DENSE = [*LAYER, "rms_norm_kernel", "up_gemm", "silu_and_mul_kernel", "down_gemm"]
EXPERTS = [*LAYER, "rms_norm_kernel", "gate_gemm", "fused_moe_kernel", "fused_moe_kernel"]


def test_roles_of_dense_layers() -> None:
    roles = roles_of_step([*DENSE, *DENSE, "rms_norm_kernel", "head_gemm"], False, False)
    matmuls = ["attention.in", "attention.out", "mlp.gate_up", "mlp.down"]
    layer = ["norms", "attention.in", "rope_kv", "attention", "attention.out"]
    layer += ["norms", "mlp.gate_up", "activation", "mlp.down"]
    assert roles == [*layer, *layer, "norms", "head"]
    assert [role for role in roles if role in matmuls] == matmuls * 2


def test_roles_of_layers_of_experts() -> None:
    roles = roles_of_step([*EXPERTS, *EXPERTS, "rms_norm_kernel", "head_gemm"], True, False)
    tail = ["router", "experts.gate_up", "experts.down"]
    assert roles[6:9] == roles[15:18] == tail
    assert roles[10] == "attention.in"
    assert roles[-1] == "head"
    shared = [*EXPERTS, "shared_gemm", "shared_gemm", "rms_norm_kernel", "head_gemm"]
    assert roles_of_step(shared, True, True)[6:] == [*tail, "shared", "shared", "norms", "head"]


def test_without_norms_or_attention_matmuls_stay_together() -> None:
    assert roles_of_step(["a_gemm", "silu_kernel", "b_gemm"], False, False) == [
        "matmuls",
        "activation",
        "matmuls",
    ]


def test_a_single_kernel_for_both_matmuls_of_experts_has_both_floors(counted: StepBytes) -> None:
    names = [*LAYER, "rms_norm_kernel", "gate_gemm", "fused_moe_kernel"]
    assert roles_of_step(names, True, False)[-1] == "experts"
    rows = (SummaryRow("fused_moe_kernel", 24, 24_000, None, None, None),)
    profile = build_profile(Recording("a test", rows=rows), MODEL, steps=1)
    found = {row.role: row for row in step_ledger(profile, counted, gpu="H100").roles}
    both = counted.roles["experts.gate_up"].weights + counted.roles["experts.down"].weights
    assert found["experts"].weight_bytes == pytest.approx(both)
    assert "experts.down" not in found


def test_times_add_up_and_floors_are_sums(ledger: StepLedger) -> None:
    assert sum(row.measured_ns for row in ledger.roles) == pytest.approx(ledger.step_ns)
    assert sum(row.bytes for row in ledger.roles) == pytest.approx(ledger.bytes)
    assert sum(row.floor_ns or 0 for row in ledger.roles) == pytest.approx(ledger.floor_ns)
    assert ledger.floor_ns == pytest.approx(2.17e6, rel=0.01)
    assert ledger.step_ns == pytest.approx(15_561_018 / 4)
    assert ledger.sol_pct == pytest.approx(100 * 2.1689 / 3.8903, abs=0.1)
    assert ledger.launches == 499
    assert ledger.host_pct == pytest.approx(17.7, abs=0.1)
    assert ledger.rate_bytes_per_s == 4.305e12


def test_a_measured_profile_is_at_42_percent_of_the_floor(counted: StepBytes) -> None:
    """Stock vLLM 0.25.1 on an H200, random weights with routing that is spread out."""
    file = ROOT / "bench/results/h200-profile/vllm-decode.json.xz"
    profile = Profile.model_validate_json(lzma.decompress(file.read_bytes()))
    found = step_ledger(profile, counted)
    assert found.gpu == "NVIDIA H200"
    assert found.step_ns == pytest.approx(5.12e6, rel=0.001)
    assert found.sol_pct == pytest.approx(42.4, abs=0.05)
    rows = {row.role: row for row in found.roles}
    measured = {name: round(row.measured_ns / 1e3) for name, row in rows.items()}
    assert measured["experts.gate_up"] == 1814
    assert measured["experts.down"] == 1131
    assert measured["head"] == 267
    assert rows["experts.gate_up"].sol_pct == pytest.approx(57, abs=0.5)
    assert (rows["head"].status, rows["head"].reason) == ("closed", "at 101 % of the floor")
    counters = next(one for one in found.kernels if one.name.endswith("_swiglu"))
    assert counters.faster_reason.startswith("at 49 % of the floor")  # by Nsight Compute


def test_gaps_are_told_by_what_is_known(ledger: StepLedger) -> None:
    rows = {row.role: row for row in ledger.roles}
    assert rows["attention.in"].status == "closed"
    assert "op linear ships" in rows["attention.in"].reason
    assert rows["experts.down"].reason == "at 97 % of the floor"
    # the profile's weights are an engine's dummies, of which all tokens pick the same experts
    assert rows["experts.gate_up"].status == "unexplained"
    assert rows["experts.gate_up"].gap_ns == pytest.approx(-143_600, rel=0.01)
    assert rows["sampling"].status == "untried"
    assert rows["sampling"].reason.endswith("no kernel of op sample_argmax was timed")
    assert rows["idle"].status == "untried"


def test_every_larger_kernel_is_answered(ledger: StepLedger) -> None:
    assert min(kernel.share_pct for kernel in ledger.kernels) >= 0.5
    assert len(ledger.kernels) == 21
    kernels = {kernel.name: kernel for kernel in ledger.kernels}
    route = kernels["_topk_forward"]
    assert (route.faster, route.fusible) == ("yes", "yes")
    assert route.in_chain
    assert "_combined_routing_memset" in route.neighbours
    gate_up = kernels["_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu"]
    assert (gate_up.faster, gate_up.fusible) == ("no", "untried")
    assert gate_up.neighbours == ("_combined_routing_compute_pow2",)
    assert gate_up.roles == ("experts gate/up",)


def _named(kernel: str) -> str | None:
    op = op_of_kernel(kernel)
    return op.name if op else None


def test_kernels_of_the_library_are_recognised_as_profilers_write_them() -> None:
    assert _named("void fused_norm::row_kernel<__nv_bfloat16, 128>(int)") == "fused_add_rms_norm"
    assert _named("(anonymous namespace)::moe_pair_kernel(Params)") == "moe_matmul_swiglu"
    assert _named("void (anonymous namespace)::linear_stream<float, 3>(float*)") == "linear"
    assert _named("rope_kv_update_kernel") == "rope_kv_update"
    assert _named("void other::row_kernel<float>(int)") is None
    assert _named("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_bias_TNT") is None


def _patched_step() -> Profile:
    names = {"(anonymous namespace)::moe_pair_kernel(Params)": 1_740_000}
    names |= {"void moe_down::stream_kernel<1, 9>(moe_down::Params)": 948_000}
    names |= {"nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT": 1_600_000, "mystery::thing<3>(int)": 60_000}
    rows = tuple(SummaryRow(name, 24, spent, None, None, None) for name, spent in names.items())
    return build_profile(Recording("a test", rows=rows), MODEL, steps=1)


def test_a_summary_is_told_by_operations_and_says_what_it_lacks(counted: StepBytes) -> None:
    found = step_ledger(_patched_step(), counted, gpu="NVIDIA H100 80GB HBM3")
    rows = {row.role: row for row in found.roles}
    assert rows["experts"].measured_ns == 2_688_000
    assert rows["experts"].sol_pct == pytest.approx(82.7, abs=0.2)
    assert rows["other"].status == "unexplained"
    assert rows["attention"].reason == "no kernel of the profile was recognised as it"
    assert {kernel.fusible for kernel in found.kernels} == {"unknown"}
    assert found.notes == (
        "not told apart here: the parts of experts and dense matmuls",
        "a summary has no wall time: the step is the time of its kernels",
    )


def test_closed_source_that_no_op_covers_is_infeasible(counted: StepBytes) -> None:
    def nowhere(_op: Op) -> tuple[tuple[str, ...], str]:
        return (), "not in this model"

    found = step_ledger(_patched_step(), counted, gpu="H100", places=nowhere)
    assert {row.role: row.status for row in found.roles}["matmuls"] == "infeasible"


def test_without_a_gpu_there_is_no_floor(counted: StepBytes) -> None:
    found = step_ledger(_patched_step(), counted)
    assert found.floor_ns is None
    assert found.sol_pct is None
    assert found.notes[0] == "no floor: the source does not name the GPU; give it with --gpu"


def test_what_has_no_ledger_is_refused(counted: StepBytes) -> None:
    profile = _patched_step()
    for change, message in (
        ({"steps": None}, "the number of steps is not known"),
        ({"phase": "prefill"}, "these are of prefill"),
    ):
        with pytest.raises(UsageError, match=message):
            step_ledger(profile.model_copy(update=change), counted)


def test_a_rate_says_where_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path))
    known = {
        name: copy_rate(Gpu(name=name)) for name in ("NVIDIA H200", "NVIDIA L4", "an unknown card")
    }
    assert known["NVIDIA H200"] is not None
    assert known["NVIDIA H200"].source == "reached by a copy, by gpus.toml"
    assert known["NVIDIA L4"] is not None
    assert known["NVIDIA L4"].source == "the peak, since no copy was measured"
    assert known["NVIDIA L4"].bytes_per_s == 3.0e11
    assert known["an unknown card"] is None
    measured = '{"device": "NVIDIA L4", "memory_gb_s": 250, "cached_gb_s": 1, '
    measured += '"flops": {"bfloat16": 1.0}, "launch_us": 1.0}'
    (tmp_path / "ceilings").mkdir()
    (tmp_path / f"ceilings/{METHOD}-a.json").write_text(measured, encoding="utf-8")
    here = copy_rate(Gpu(name="NVIDIA L4"))
    assert here is not None
    assert (here.bytes_per_s, here.source) == (2.5e11, "reached by a copy on this machine")


def test_what_keeps_a_state_is_no_case_for_attention() -> None:
    """A hybrid as vLLM serves it on an H200: its convolution is of the role, and of no op."""
    kept = json.loads(content(ROOT / "bench/results/h200-vllm-0.33" / f"{HYBRID}.json.xz"))
    profile = Profile.model_validate(kept["profiles"][1]["profile"])
    model = HYBRID.removeprefix("ledger-")
    made = step_ledger(profile, step_bytes(model, 8, 1024), places=places_in(model, "vllm"))
    why = {each.name: each.faster_reason for each in made.kernels}
    assert made.sol_pct == pytest.approx(kept["profiles"][1]["profile"]["ledger"]["sol_pct"])
    assert "no op of the library covers it" in why["_causal_conv1d_update_kernel"]
    [flash] = (said for name, said in why.items() if "FlashAttnFwdSm90" in name)
    assert "op decode_attention ships for it" in flash
