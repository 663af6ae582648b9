"""Where ops can be put in a model, and at which sizes they are judged for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import patcher
from patch_sample import make_patch

from patcher.ab import compare, session
from patcher.ab.job import ABJob
from patcher.bench import UsageError, VerificationError, Workload, load_op, load_ops, sweep_named
from patcher.integrate.vllm.places import must_fit
from patcher.places import places_in, require_layers, require_some_place
from patcher.sweeps import place_of, served_sweep

TRACE = Path(__file__).parents[1] / "data/kineto/vllm_one_step_mi300.json.gz"
NORM = load_op("fused_add_rms_norm")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def model_of(folder: Path, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **more}), encoding="utf-8")
    return str(folder)


def workload(model: str, dtype: str = "float32", device: str = "cpu") -> Workload:
    sizes = {"batch": 1, "input_len": 1, "output_len": 1}
    return Workload(model=model, device=device, dtype=dtype, **sizes)  # type: ignore[arg-type]


def test_a_model_is_asked_by_its_config(tmp_path: Path) -> None:
    tiny, llama = places_in("gpt-oss-tiny", "transformers"), places_in(model_of(tmp_path))
    assert tiny is not None
    assert llama is not None
    both = "transformers: gpt_oss.decoder_layer", "transformers: add_norm"
    assert tiny(NORM) == (both, "")
    assert "transformers: gpt_oss.decoder_layer" not in llama(NORM)[0]
    assert "tensorrt_llm: flashinfer_fused_add_rmsnorm" in llama(NORM)[0], "it cannot tell here"
    here = places_in(str(tmp_path), "transformers")
    assert here is not None
    assert here(NORM) == (("transformers: add_norm",), "")
    points, why = here(load_op("moe_reduce"))
    assert not points
    assert why.split("; ") == [
        "LlamaForCausalLM has no layer of gpt_oss.experts, which is of gpt-oss alone",
        "no experts of llama in transformers are run by grouped_mm or batched_mm",
    ]
    assert here(load_op("moe_finalize")) == ((), "it has no patch point in transformers")
    assert places_in("what a person wrote beside a file") is None


def test_a_model_without_places_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_some_place(workload("gpt-oss-tiny"))
    require_some_place(workload(model_of(tmp_path)))
    other = model_of(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    require_some_place(workload(other))  # its output matrix is a linear layer
    ops = {name: op for name, op in load_ops().items() if name != "linear"}
    monkeypatch.setattr("patcher.places.load_ops", lambda: ops)
    with pytest.raises(UsageError, match="no op of the library can be put in") as caught:
        require_some_place(workload(other))
    assert "GPT2LMHeadModel has no layer" in caught.value.message

    def refuses(*_: object) -> str:
        raise VerificationError("its norms multiply by 1 + w", "")

    point = "patcher.integrate.transformers.places.of_model"
    monkeypatch.setattr(point, refuses)
    tiny = places_in("gpt-oss-tiny", "transformers")
    assert tiny is not None
    assert tiny(NORM) == ((), "its norms multiply by 1 + w")


def test_a_config_json_refuses_layers_where_the_engine_is_not_installed(tmp_path: Path) -> None:
    plain = places_in(model_of(tmp_path), "vllm")
    assert plain is not None
    points, why = plain(load_op("linear_fp8"))
    assert not points
    assert why == "linear_fp8 takes fp8 weights, those of this LlamaForCausalLM are not quantised"


def test_a_router_whose_weights_are_not_renormalised_is_another() -> None:
    config = {"architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False}
    with pytest.raises(VerificationError, match=r"takes norm_topk_prob True, .* is False"):
        must_fit("router.topk", config)
    must_fit("router.topk", {**config, "norm_topk_prob": True})
    must_fit("router.topk", {"architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-3-27b"])
def test_a_known_model_is_asked_without_torch(model: str) -> None:
    code = (
        f"import sys, patcher; found = patcher.profile({str(TRACE)!r}, model={model!r});"
        "print(any(spot.patch_points for spot in found.hotspots),"
        " *sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.parametrize(
    ("op", "device", "dtype", "more", "name"),
    [
        ("fused_add_rms_norm", "cpu", "float32", {}, "cpu@hidden=96"),
        ("fused_add_rms_norm", "cpu", "float32", {"hidden_size": 256}, None),
        ("fused_add_rms_norm", "cuda", "bfloat16", {"hidden_size": 2880}, None),
        (
            "fused_add_rms_norm",
            "cuda",
            "float16",
            {},
            "bf16@hidden=96,T=float16,W=float16",
        ),
        ("rope", "cuda", "bfloat16", {}, "bf16@q_heads=4,kv_heads=2,head_dim=16"),
        ("moe_route", "cpu", "float32", EXPERTS, "cpu@experts=16,top_k=2"),
        ("linear", "cuda", "bfloat16", {}, "layers@inner=96,outer=128:256"),
        ("linear", "cuda", "bfloat16", EXPERTS, "layers@inner=96,outer=16:128"),
    ],
)
def test_a_kernel_is_judged_at_the_models_sizes(
    op: str, device: str, dtype: str, more: dict[str, Any], name: str | None, tmp_path: Path
) -> None:
    served = workload(model_of(tmp_path, **more), dtype, device)
    known = load_op(op)
    assert served_sweep(known, device, None, served) == name
    assert served_sweep(known, device, None, None) is None
    if name is not None:
        found = known.sweep(device, name)
        assert found == sweep_named(known.contract, name)
        assert all(point.dtypes == found.dtypes for point in found.points())
        assert served_sweep(known, device, name, served) == name, "what the user says holds"


def test_sizes_that_no_kernel_has_to_take_are_refused(tmp_path: Path) -> None:
    odd = workload(model_of(tmp_path, hidden_size=100))
    with pytest.raises(UsageError, match=r"not for hidden = 100.*a multiple of 8, at most 16,384"):
        served_sweep(NORM, "cpu", None, odd)
    for wrong in ("cpu@hidden=x", "cpu@tokens=1:x", "cpu@depth=3", "cpu@T=int8"):
        with pytest.raises(UsageError, match="is no size or dtype of cpu"):
            NORM.sweep("cpu", wrong)
    for twice in ("cpu@hidden=64,hidden=128", "cpu@tokens=1,tokens=2", "cpu@T=float32,T=bfloat16"):
        with pytest.raises(UsageError, match="is given twice"):
            NORM.sweep("cpu", twice)
    attention = load_op("decode_attention")
    with pytest.raises(UsageError, match=r"not for tokens = 0: .* at least 1"):
        attention.sweep("cpu", f"{attention.sweep('cpu').name}@tokens=0:4")
    with pytest.raises(UsageError, match="has no sweep nope@hidden=8 for cpu"):
        NORM.sweep("cpu", "nope@hidden=8")


def test_a_loop_says_where_its_op_goes_in_and_at_which_sizes(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    place = place_of(load_op("rms_norm"), "cpu", None, workload(model))
    assert place.sweep == "cpu@hidden=96"
    assert place.said.startswith("rms_norm goes in at transformers: norm; judged at tokens 1, ")
    assert place.said.endswith("; hidden 96; float32")
    with pytest.raises(UsageError, match=r"moe_route cannot be put in .* has no patch point in"):
        place_of(load_op("moe_route"), "cpu", None, workload(model))


def test_optimize_refuses_an_op_that_a_served_model_has_no_place_for(tmp_path: Path) -> None:
    asks = f"exchange:{tmp_path / 'prompts'}"
    model = model_of(tmp_path)

    def said(op: str, *more: str) -> tuple[int, str]:
        words = ("optimize", op, "--language", "cpp", "--model", asks, *more)
        done = patcher(*words, cwd=tmp_path)
        return done.returncode, " ".join(done.stderr.split())

    code, words = said("gemma_rms_norm", "--served", model)
    assert code == 2
    assert "cannot be put in" in words
    assert "no norm of llama in transformers multiplies by one more than its weight" in words
    code, words = said("linear_fp8", "--served", model, "--engine", "vllm")
    assert (code, "are not quantised" in words) == (2, True)
    code, words = said("rms_norm", "--engine", "vllm")
    assert (code, "add --served MODEL" in words) == (2, True)
    assert not (tmp_path / "prompts").exists(), "nobody was asked"
    code, words = said("rms_norm", "--served", model)
    assert (code, "rms_norm goes in at transformers: norm" in words) == (6, True)
    [prompt] = (tmp_path / "prompts").glob("*.prompt.md")
    assert "Timed points (cpu@hidden=96)" in prompt.read_text(encoding="utf-8")


def test_patches_without_layers_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make_patch(tmp_path / "patch")
    asked = workload(model_of(tmp_path))
    with pytest.raises(VerificationError, match=r"has no layer of gpt_oss.decoder_layer"):
        require_layers(asked, [patch])
    require_layers(workload("gpt-oss-tiny"), [patch])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was loaded"))
    job = ABJob(workload=asked)
    for processes in (0, 3):
        asked_so = job.model_copy(update={"process_pairs": processes})
        with pytest.raises(VerificationError, match=r"has no layer of gpt_oss.decoder_layer"):
            compare.compare_patches(asked_so, [patch.folder], lambda *_: None)
    with pytest.raises(VerificationError, match=r"has no layer of gpt_oss.decoder_layer"):
        session.compare_sets(job, {"one": [patch]}, tmp_path / "kept", lambda *_: None)


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
@pytest.mark.parametrize("point", ["linear", "qkv_rope_kv"])
def test_plain_matmuls_are_none_of_a_model_whose_linear_layers_are_all_quantised(
    point: str, method: str
) -> None:
    quantised = {**LLAMA, "quantization_config": {"quant_method": method}}
    with pytest.raises(VerificationError, match=f"plain weights, those of every .* are {method}"):
        must_fit(point, quantised)
    must_fit("lm_head", quantised)
    must_fit(point, LLAMA)
    must_fit(point, {**quantised, **EXPERTS})  # its routers are plain
    must_fit(point, {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}})
    must_fit(point, {"vision_config": {}, "text_config": LLAMA, **quantised})
    spared = {"quant_method": method, "modules_to_not_convert": ["o_proj"]}
    must_fit(point, {**LLAMA, "quantization_config": spared})
