"""Options that no workload can have are refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patcher.bench import UsageError, Workload
from patcher.bench.engines.architecture import own_dtype
from patcher.workloads import workload_for, workload_of


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        workload_of(str(tmp_path), "cpu", "transformers", None, None, None, "local")
    config = tmp_path / "config.json"
    config.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="says no model_type"):
        workload_of(str(tmp_path), "cpu", "transformers", None, None, None, "local")
    config.write_text('{"model_type": "llama", "num_hidden_layers": 1}', encoding="utf-8")
    found = workload_of(str(tmp_path), "cpu", "transformers", None, None, None, "local")
    assert found.model == str(tmp_path)
    with pytest.raises(UsageError, match="which has no weights beside it"):
        workload_of(str(config), "cpu", "transformers", None, None, None, "hub")


def test_local_weights_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        workload_of(str(tmp_path / "typo"), "cpu", "transformers", None, None, None, "local")


def test_a_prompt_leaves_room_for_a_token() -> None:
    def ask(prompt: int) -> int:
        return workload_of(
            "gpt-oss-tiny", "cpu", "transformers", None, prompt, None, "random"
        ).input_len

    assert ask(4095) == 4095
    with pytest.raises(UsageError, match="context has 4,096") as caught:
        ask(4096)
    assert caught.value.hint == "give at most 4,095 prompt tokens"


@pytest.mark.parametrize("batch", [0, 10**23])
def test_a_batch_has_bounds(batch: int) -> None:
    with pytest.raises(UsageError, match="batch should be"):
        workload_of("gpt-oss-tiny", "cpu", "transformers", batch, None, None, "random")


@pytest.mark.parametrize(
    ("published", "on_cpu", "on_gpu"),
    [
        ('"torch_dtype": "float16"', "float32", "float16"),
        ('"dtype": "bfloat16"', "float32", "bfloat16"),
        ('"dtype": "float32"', "float32", "bfloat16"),
        ('"vocab_size": 32000', "float32", "bfloat16"),
    ],
)
def test_a_model_keeps_the_half_that_it_was_published_in(
    published: str, on_cpu: str, on_gpu: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        f'{{"model_type": "llama", "num_hidden_layers": 1, {published}}}', encoding="utf-8"
    )
    assert workload_for(str(config), "cpu").dtype == on_cpu
    assert workload_for(str(config), "cuda", engine="vllm").dtype == on_gpu
    assert workload_for(str(config), "cuda", engine="vllm", dtype="float32").dtype == "float32"


def test_a_preset_runs_in_the_dtype_that_was_asked_for() -> None:
    def ask(dtype: Any) -> str:
        served = "gpt-oss-tiny", "cpu", "transformers", None, None, None, "random"
        return workload_of(*served, dtype=dtype).dtype

    assert ask(None) == "float32"
    assert ask("bfloat16") == "bfloat16"
    with pytest.raises(UsageError, match="dtype"):
        ask("int8")


@pytest.mark.parametrize("text", ["7", "[1]", '"llama"'])
def test_a_text_tower_that_is_no_object_is_said(text: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(f'{{"model_type": "gemma3", "text_config": {text}}}', encoding="utf-8")
    for device in ("cpu", "cuda"):
        with pytest.raises(UsageError, match="text_config is no JSON object"):
            workload_of(str(config), device, "vllm", None, None, None, "random")


def test_a_text_towers_dtype_is_found(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    tower = '{"model_type": "gemma3", "text_config": {"dtype": "torch.float16"}}'
    config.write_text(tower, encoding="utf-8")
    gemma = Workload(
        model=str(config), device="cpu", dtype="float32", batch=1, input_len=1, output_len=1
    )
    assert own_dtype(gemma) == "float16"
