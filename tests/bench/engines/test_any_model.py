"""Architectures of every kind in transformers, in miniature, with random weights, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from tiny_models import EXPERTS, KINDS, MORE, model_of, multimodal

from patcher.bench import MissingError, PatcherError, UsageError, Workload, presets
from patcher.bench.engines import architecture
from patcher.bench.engines.causal_model import refused, skeleton
from patcher.bench.engines.model_config import configuration
from patcher.bench.engines.transformers import TransformersEngine
from patcher.hotspot.roofline import ServedModel
from patcher.workloads import workload_for

WITH_EXPERTS = {
    *("mixtral", "gpt_oss", "qwen3_moe", "qwen3_next", "granitemoehybrid", "kimi_linear"),
    *("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "deepseek_v4"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models: threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workload(model: str) -> Workload:
    return workload_for(model, "cpu", batch=2, input_len=12, output_len=6)


def values_of(engine: TransformersEngine) -> Iterator[tuple[str, torch.Tensor]]:
    yield from engine.model.named_parameters()
    yield from engine.model.named_buffers()


def serves(model: str, experts: bool) -> None:
    """It decodes what its logits say, from the seed, and the reference is near and finer."""
    engine = TransformersEngine(workload(model))
    before = {name: each.clone() for name, each in values_of(engine)}
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
    assert all(each.equal(before[name]) for name, each in values_of(engine))
    assert all(each.dtype is before[name].dtype for name, each in values_of(engine))
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


@pytest.mark.parametrize(("kind", "norms"), [("llama", torch.bfloat16), ("gpt_oss", torch.float32)])
def test_norms_have_the_dtype_that_weights_are_loaded_in(
    kind: str, norms: torch.dtype, tmp_path: Path
) -> None:
    model = model_of(tmp_path, kind, **EXPERTS)
    engine = TransformersEngine(workload(model).model_copy(update={"dtype": "bfloat16"}))
    assert engine.model.model.norm.weight.dtype is norms
    prompts = engine.prompts(1)
    wide, how = engine.reference_logits(prompts)
    assert (wide.dtype, how) == (torch.float32, "float32 upcast of the same weights")
    off = (wide - engine.logits(prompts)).abs().max()
    assert 1e-4 * wide.abs().max() < off < 0.1 * wide.abs().max()


def test_what_transformers_does_not_centre_on_zero_stays(tmp_path: Path) -> None:
    model = TransformersEngine(workload(model_of(tmp_path, "mamba2", **KINDS["mamba2"]))).model
    mixer = model.backbone.layers[0].mixer
    assert mixer.A_log.exp().allclose(torch.arange(1, 9).float()), "rates of decay"
    assert mixer.D.eq(1).all(), "what goes past the state"
    assert 0.01 < mixer.in_proj.weight.std() < 0.03


def test_of_a_multimodal_model_the_language_model_is_served(tmp_path: Path) -> None:
    serves(multimodal(tmp_path), experts=False)


def test_a_config_alone_is_a_model(tmp_path: Path) -> None:
    folder = model_of(tmp_path, "llama")
    file = str(tmp_path / "config.json")
    assert architecture.full_config(file) == architecture.full_config(folder)
    assert ServedModel.of(file, 4) == ServedModel.of(folder, 4)
    axes = {"tokens": 4, "hidden": 64, "q_heads": 4, "kv_heads": 2, "group": 2, "head_dim": 16}
    served = ServedModel.of(file, 4)
    assert served == ServedModel(layers=2, axes={**axes, "intermediate": 128})


def test_norms_do_nothing(tmp_path: Path) -> None:
    model = TransformersEngine(workload(model_of(tmp_path, "gemma3_text"))).model
    assert model.model.norm.weight.eq(0).all(), "one more than its weight is what it multiplies by"
    other = TransformersEngine(workload(model_of(tmp_path / "gpt2", "gpt2", **KINDS["gpt2"]))).model
    assert other.transformer.ln_f.weight.eq(1).all()
    assert other.transformer.ln_f.bias.eq(0).all()


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        ({"max_position_embeddings": 512, "n_positions": 128}, 128),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": -1, "n_positions": 128}, 128),
    ],
)
def test_a_context_of_any_length_leaves_room(
    lengths: dict[str, int], longest: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet", **lengths}))
    assert architecture.longest_context(str(tmp_path)) == longest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "newest"}, "has no architecture 'newest'"),
        ({"model_type": "its", "auto_map": {"AutoConfig": "a.Its"}}, "needs code of its own"),
        ({"model_type": "vit"}, "no causal model"),
        ({"hidden_size": 63}, "not a multiple of the number of attention heads"),
        ({"max_position_embeddings": 8}, "leave no room"),
        ({"vocab_size": 0}, "cannot build .*out of bounds"),
        ({"pad_token_id": 512}, "cannot build .*[Pp]adding_idx"),
        ({"hidden_act": "newest"}, "cannot build .*it knows no 'newest'"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
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


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (
            "llama",
            {"num_key_value_heads": 3},
            "cannot run .*a LlamaForCausalLM: The size of tensor",
        ),
        ("llama", {"rms_norm_eps": float("nan")}, "the logits of .* are not numbers"),
        ("mixtral", {**EXPERTS, "num_experts_per_tok": 9}, "cannot run .*out of range"),
        ("bert", {}, "keeps nothing between steps"),
    ],
)
def test_a_model_that_builds_and_does_not_decode_is_refused_before_it_is_measured(
    kind: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    asked = workload(model_of(tmp_path, kind, **change))
    engine = TransformersEngine(asked)
    with pytest.raises(UsageError, match=said):
        engine.generate(engine.prompts(0), 2)


def test_a_model_that_needs_more_memory_is_not_told_of_its_config() -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with pytest.raises(type(error)), refused("run it"):
            raise error


@pytest.mark.parametrize("name", presets())
def test_a_preset_has_as_many_parameters_as_it_says(name: str) -> None:
    preset = presets()[name]
    config = configuration(preset)
    count = sum(each.numel() for each in skeleton(config, name).parameters())
    if config.tie_word_embeddings:  # which a skeleton does not
        count -= config.vocab_size * config.hidden_size
    assert count / 1e9 == pytest.approx(preset.parameters_b, rel=0.01, abs=6e-4)


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (errors.GatedRepoError, MissingError, "its owner has to let you read it"),
        (errors.RepositoryNotFoundError, UsageError, "has no model some/model"),
        (TimeoutError, MissingError, "the hub cannot be reached"),
        (errors.RemoteEntryNotFoundError, UsageError, "has no config.json"),
        (errors.HfHubHTTPError, MissingError, "did not send the config.json"),
        (errors.HFValidationError, UsageError, "no Hugging Face id"),
    ],
)
def test_what_the_hub_says_is_one_sentence(
    raised: type[Exception],
    error: type[PatcherError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        error = raised.__new__(raised)  # those of HTTP want the whole response
        error.args = ("a long story",)
        raise error

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    with pytest.raises(error, match=said):
        workload("some/model-that-is-in-no-cache")


def test_a_hub_that_is_out_of_reach_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    url = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
    with pytest.raises(MissingError, match="the hub cannot be reached"):
        workload("some/model-that-is-in-no-cache")
    assert not caplog.messages, "the hub's client tells of each further try"


def test_a_model_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(tmp_path, "llama")

    def download(*_: Any, local_files_only: bool = False) -> str:
        assert local_files_only
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert workload("some/model").model == "some/model"
    assert type(TransformersEngine(workload("some/model")).model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("kind", "cached", "has_state"),
    [
        ("llama", 2 * 2 * 16, False),
        ("deepseek_v2", 16 + 16, False),
        ("granitemoehybrid", 2 * 2 * 16, True),
        ("qwen3_next", 2 * 2 * 16, True),
    ],
)
def test_what_a_layer_keeps_of_a_token(
    kind: str, cached: int, has_state: bool, tmp_path: Path
) -> None:
    sizes = architecture.model_sizes(model_of(tmp_path, kind, **KINDS[kind]))
    assert (sizes.cached, sizes.has_state, sizes.layers) == (cached, has_state, 2)


def test_quantised_models_are_for_engines_that_have_their_kernels(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UsageError, match=r"quantised \(fp8\)"):
        TransformersEngine(workload(model_of(tmp_path, "llama", **quantised)))


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_format_is_found_wherever_vllm_looks_for_it(
    name: str, nested: bool, tmp_path: Path
) -> None:
    model, said = multimodal(tmp_path), {"quant_method": "compressed-tensors"}
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    (config["text_config"] if nested else config)[name] = said
    file.write_text(json.dumps(config), encoding="utf-8")
    assert architecture.quantization(config) == said
    with pytest.raises(UsageError, match=r"quantised \(compressed-tensors\)"):
        workload(model)
    with pytest.raises(UsageError, match=f"{name} is no JSON object"):
        architecture.quantization({name: "fp8"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_hidden_layers": 3},
            r"lack parameters of its config.json: 9, such as model.layers.2",
        ),
        ({"intermediate_size": 256}, "have other sizes than its config.json says: 6, such as"),
        ({"model_type": "qwen3"}, "lack parameters of its config.json: 4, such as"),
        ({}, "cannot load weights of .*header"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Nothing is made up for what they lack: it would have no seed."""
    TransformersEngine(workload(model_of(tmp_path, "llama"))).model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), **change}
    config.pop("layer_types", None)
    file.write_text(json.dumps(config), encoding="utf-8")
    if not change:
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    asked = workload_for(str(tmp_path), "cpu", batch=2, input_len=8, weights="local")
    with pytest.raises(UsageError, match=said):
        TransformersEngine(asked)


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no object"):
        workload(str(tmp_path))
    for text in ("{", "[" * 200_000):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="is not JSON"):
            workload(str(tmp_path))


def test_a_gguf_file_is_told_the_way(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path):
        for weights in ("random", "local"):
            with pytest.raises(UsageError, match="holds its model as GGUF") as caught:
                workload_for(str(model), "cpu", weights=weights)  # type: ignore[arg-type]
            assert "my-own-model.md" in caught.value.hint


def test_a_model_that_the_free_memory_does_not_hold_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 20}
    model = model_of(tmp_path, "llama", **large)
    monkeypatch.setattr(architecture, "free_host_bytes", lambda: 30 << 30)
    architecture.must_fit_cpu(model)
    monkeypatch.setattr(architecture, "free_host_bytes", lambda: 10 << 30)
    with pytest.raises(MissingError, match=r"3\.\d+ billion parameters\) does not fit a CPU"):
        architecture.must_fit_cpu(model)
    small = model_of(tmp_path / "small", "llama")
    monkeypatch.setattr(architecture, "free_host_bytes", lambda: 0)
    architecture.must_fit_cpu(small)
