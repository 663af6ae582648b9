"""Options that no workload can have are refused before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.bench import UsageError
from patcher.workloads import workload_of


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
