"""Which models have somewhere for an op to go, by their config.json, before a loop is paid for."""

from __future__ import annotations

import pytest
from transformers_sample import GPT_OSS

from patcher import bench
from patcher.bench import UsageError, VerificationError
from patcher.bench.engines.architecture import published_config
from patcher.integrate import must_fit_model
from patcher.integrate.transformers.places import of_model

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
    with pytest.raises(VerificationError, match="Qwen3ForCausalLM has no layer") as caught:
        must_fit_model(NORM, "transformers", lambda: OTHER)
    assert "--engine vllm" in caught.value.hint

    def never() -> dict[str, object]:
        raise AssertionError("no point of this engine asks")

    assert must_fit_model(NORM, "tensorrt_llm", never)
    with pytest.raises(UsageError, match="no patch point in"):
        must_fit_model(bench.load_op("moe_finalize"), "transformers", never)
