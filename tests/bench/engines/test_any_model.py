"""Architectures of every kind in transformers, in miniature, with random weights, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from patcher.bench import MissingError, UsageError, Workload
from patcher.bench.engines import architecture
from patcher.bench.engines.transformers import TransformersEngine
from patcher.hotspot.roofline import ServedModel
from patcher.workloads import workload_for

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
LINEAR = {
    f"linear_{name}": size
    for name, size in (
        ("num_key_heads", 2),
        ("num_value_heads", 4),
        ("key_head_dim", 16),
        ("value_head_dim", 16),
    )
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 64},
    "mixtral": EXPERTS,
    "deepseek_v2": {**ROUTED, **LATENT, "v_head_dim": 16, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 64,
    },
    "qwen3_next": {
        **EXPERTS,
        **LINEAR,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
MORE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("qwen2", "qwen3", "phi3", "olmo2")},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "gemma2": {"sliding_window": 64},
    "glm4_moe": ROUTED,
    "mamba": {"state_size": 8},
    "rwkv": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}
WITH_EXPERTS = {"mixtral", "deepseek_v2", "granitemoehybrid", "qwen3_next", "qwen3_moe", "glm4_moe"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models: threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(folder: Path, kind: str, **more: Any) -> str:
    """A folder with the config.json of a small model, and nothing else."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    return str(folder)


def workload(model: str) -> Workload:
    return workload_for(model, "cpu", batch=2, input_len=12, output_len=6)


def multimodal(folder: Path) -> str:
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    seen |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=SIZES, vision_config=seen)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    return str(folder)


def serves(model: str, experts: bool) -> None:
    """It decodes what its logits say, from the seed, and the reference is near and finer."""
    engine = TransformersEngine(workload(model))
    before = {name: each.clone() for name, each in engine.model.named_parameters()}
    prompts = engine.prompts(1)
    tokens = engine.generate(prompts, 4).tokens
    whole = torch.cat([prompts, tokens], 1)
    logits = engine.logits(whole)[:, prompts.shape[1] - 1 : -1]
    assert logits.isfinite().all()
    assert len(tokens.unique()) > 2
    assert logits.argmax(-1).equal(tokens)
    assert TransformersEngine(workload(model)).generate(prompts, 4).tokens.equal(tokens)
    wide, how = engine.reference_logits(whole)
    assert how == "float64 upcast of the same weights"
    off = (wide[:, prompts.shape[1] - 1 : -1] - logits).abs().max()
    assert off < 1e-3 * logits.abs().max()
    assert all(each.equal(before[name]) for name, each in engine.model.named_parameters())
    assert {each.dtype for each in engine.model.parameters()} == {torch.float32}
    entropy = engine.routing_entropy_pct(prompts, 3)
    assert (entropy is not None) == experts
    assert entropy is None or entropy > 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_kind_is_served(kind: str, tmp_path: Path) -> None:
    serves(model_of(tmp_path, kind, **KINDS[kind]), kind in WITH_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_further_models_are_served(kind: str, tmp_path: Path) -> None:
    serves(model_of(tmp_path, kind, **MORE[kind]), kind in WITH_EXPERTS)


def test_of_a_multimodal_model_the_language_model_is_served(tmp_path: Path) -> None:
    serves(multimodal(tmp_path), experts=False)


def test_a_config_alone_is_a_model(tmp_path: Path) -> None:
    folder = model_of(tmp_path, "llama")
    file = str(tmp_path / "config.json")
    assert architecture.full_config(file) == architecture.full_config(folder)
    assert ServedModel.of(file, 4) == ServedModel.of(folder, 4)
    axes = {"tokens": 4, "hidden": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
    assert ServedModel.of(file, 4) == ServedModel(layers=2, axes=axes, family="llama")


def test_norms_do_nothing(tmp_path: Path) -> None:
    model = TransformersEngine(workload(model_of(tmp_path, "gemma3_text"))).model
    assert model.model.norm.weight.eq(0).all(), "one more than its weight is what it multiplies by"
    other = TransformersEngine(workload(model_of(tmp_path / "gpt2", "gpt2", **KINDS["gpt2"]))).model
    assert other.transformer.ln_f.weight.eq(1).all()
    assert other.transformer.ln_f.bias.eq(0).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "newest"}, "transformers"),
        ({"auto_map": {"AutoConfig": "configuration.Its"}}, "patcher runs no such code"),
        ({"max_position_embeddings": 8}, "leave no room"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_measured(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = model_of(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}), encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        workload(model)


def test_quantised_models_are_for_engines_that_have_their_kernels(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UsageError, match=r"quantised \(fp8\)"):
        TransformersEngine(workload(model_of(tmp_path, "llama", **quantised)))


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no object"):
        workload(str(tmp_path))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="is not JSON"):
        workload(str(tmp_path))


def test_a_model_that_is_too_large_for_a_cpu_is_refused_early(tmp_path: Path) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 20}
    with pytest.raises(MissingError, match=r"3\.\d+ billion parameters\) does not fit a CPU"):
        architecture.must_fit_cpu(model_of(tmp_path, "llama", **large))
