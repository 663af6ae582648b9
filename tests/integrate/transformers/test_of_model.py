"""Which models have somewhere for an op to go, by their config.json, before a loop is paid for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from model_matrix import decoded
from patch_sample import evaluation, make_patch
from tiny_models import KINDS, MORE, model_of
from transformers_sample import GPT_OSS, original_kernel

from patcher import bench
from patcher.bench import PatcherError, UsageError, VerificationError
from patcher.bench.engines.architecture import full_config, published_config
from patcher.bench.engines.causal_model import skeleton
from patcher.bench.engines.model_config import model_config
from patcher.integrate import Patch, must_fit_model, verify
from patcher.integrate.layers import StepCalls
from patcher.integrate.places import calls_in_step
from patcher.integrate.transformers.places import LAYERS, ROLES, of_model

OTHER = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
NORM = bench.load_op("fused_add_rms_norm")


@pytest.mark.parametrize("name", GPT_OSS)
def test_transformers_points_are_of_gpt_oss(name: str) -> None:
    said = of_model(name, lambda: published_config("gpt-oss-tiny"))
    assert said == f"GptOssForCausalLM has layers of {name}"
    with pytest.raises(VerificationError, match=f"Qwen3ForCausalLM has no layer of {name}"):
        of_model(name, lambda: OTHER)


def test_the_config_is_read_if_a_point_asks() -> None:
    found = must_fit_model(NORM, "transformers", lambda: published_config("gpt-oss-20b"))
    assert found == "gpt_oss.decoder_layer"
    assert must_fit_model(NORM, "transformers", lambda: OTHER) == "add_norm"
    with pytest.raises(VerificationError, match="no layer of olmo2 in transformers takes"):
        must_fit_model(NORM, "transformers", lambda: {"model_type": "olmo2"})
    experts = bench.load_op("moe_reduce")
    with pytest.raises(VerificationError, match="no experts of qwen3 in transformers") as caught:
        must_fit_model(experts, "transformers", lambda: OTHER)
    assert "name another op" in caught.value.hint

    def never() -> dict[str, object]:
        raise AssertionError("no point of this engine asks")

    assert must_fit_model(NORM, "tensorrt_llm", never)
    with pytest.raises(UsageError, match="no patch point in"):
        must_fit_model(bench.load_op("moe_finalize"), "transformers", never)


@pytest.mark.parametrize("point", ["linear", "rotation"])
def test_an_architecture_in_the_file_of_another_has_its_roles(point: str) -> None:
    said = of_model(point, lambda: {"model_type": "internlm3"})
    assert said == f"internlm3 has layers of {point}"


@pytest.mark.parametrize("point", ["norm", "gated_mlp"])
def test_an_architecture_may_have_the_classes_of_another(point: str) -> None:
    said = of_model(point, lambda: {"model_type": "internlm3", "hidden_act": "silu"})
    assert said.startswith("internlm3 has Llama")


@pytest.mark.parametrize("epsilon", [None, 1e-5])
def test_norms_that_a_setting_chooses_are_there_if_it_does(
    epsilon: float | None, tmp_path: Path
) -> None:
    """Cohere's models have layer norms, or norms of the root mean square."""
    config = full_config(model_of(tmp_path, "cohere2_moe", rms_norm_eps=epsilon, num_experts=4))
    model = skeleton(model_config(str(tmp_path)), "it")
    there = any("RMSNorm" in type(each).__name__ for each in model.modules())
    assert there is (epsilon is not None)
    if there:
        assert of_model("norm", lambda: config) == "cohere2_moe has Cohere2MoeRMSNorm"
    else:
        with pytest.raises(VerificationError, match="no norm of cohere2_moe"):
            of_model("norm", lambda: config)


@pytest.mark.parametrize("point", ["norm", "gemma_norm", "gated_mlp", *ROLES])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "newest"}, "has no architecture 'newest'"),
        ({"model_type": "../models/llama"}, "has no architecture"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config is no JSON object"),
    ],
)
def test_a_config_that_is_none_is_told_so(point: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(PatcherError, match=said):
        of_model(point, lambda: config)


def test_a_config_that_does_not_build_is_told_so() -> None:
    config = {"model_type": "qwen2_moe", "num_experts": 4, "hidden_size": "wide"}
    with pytest.raises(
        UsageError, match=r"cannot configure this model, a qwen2_moe: .*hidden_size"
    ):
        of_model("gated_mlp", lambda: config)


@pytest.mark.parametrize("named", [7, "Qwen3ForCausalLM", None])
def test_architectures_that_are_no_list_are_left_out(named: object) -> None:
    config = {"model_type": "qwen3", "architectures": named}
    with pytest.raises(VerificationError, match=r"^qwen3 has no layer of gpt_oss"):
        of_model("gpt_oss.experts", lambda: config)


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "gpt_oss", "llama4_text"),
        *("deepseek_v2", "deepseek_v4", "kimi_linear", "mamba2", "granitemoehybrid", "qwen3_next"),
        *("falcon_h1", "mamba"),
    ],
)
def test_a_config_tells_how_often_a_step_comes_by(kind: str, tmp_path: Path) -> None:
    config = full_config(model_of(tmp_path / kind, kind, **{**KINDS, **MORE}[kind]))
    told = {}
    for point in LAYERS:
        with suppress(VerificationError):
            of_model(point, lambda: config)
            guards = original_kernel(point, bounded=True).guards
            told[point] = calls_in_step("transformers", point, config, guards)
    ran = {name: said.split(" of ") for name, said in decoded(kind, tmp_path).items()}
    promised = {
        name: [str(calls.taken), *([str(calls.total)] if calls.refused else [])]
        for name, calls in told.items()
        if calls
    }
    assert promised == ran, "what a decoded step ran"


def test_a_model_whose_code_needs_weights_does_not_tell_how_often(tmp_path: Path) -> None:
    config = full_config(model_of(tmp_path, "jetmoe", **MORE["jetmoe"]))
    assert calls_in_step("transformers", "norm", config) is None


def test_norms_without_a_weight_are_not_promised(tmp_path: Path) -> None:
    """Those of values, of the same class as the others."""
    config = full_config(model_of(tmp_path, "gemma4_unified_text", num_experts=4))
    assert calls_in_step("transformers", "norm", config) == StepCalls(13)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", "15 times"),
        ("mamba", "5 times; not 2 times: outer no multiple of 8"),
        ("jetmoe", "an unknown number of times until it is loaded"),
    ],
)
def test_verify_tells_what_the_guards_refuse(kind: str, said: str, tmp_path: Path) -> None:
    op, source = bench.load_op("linear"), "// linear\n"
    candidate = bench.Candidate(op=op.name, language=bench.Language.CPP, source=source)
    judged = evaluation(candidate).model_copy(update={"op": op.name})
    patch = Patch.create(
        tmp_path / "patch", op, candidate, judged, engine="transformers", made_by="test"
    )
    config = full_config(model_of(tmp_path / kind, kind, **{**KINDS, **MORE}[kind]))
    told = verify(patch, config).checks[-1]
    assert told.passed
    assert told.detail.endswith(f" of linear; a step of decode calls them {said}")


def test_verify_tells_how_often_a_step_comes_by(tmp_path: Path) -> None:
    told = verify(make_patch(tmp_path / "patch"), published_config("gpt-oss-tiny")).checks[-1]
    calls = 2 * bench.preset("gpt-oss-tiny").config["num_hidden_layers"]
    assert told.passed
    assert told.detail.endswith(f"gpt_oss.decoder_layer; a step of decode calls them {calls} times")
