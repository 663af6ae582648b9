"""`patcher ops observe` and `evaluate --recorded`, on what a model in bfloat16 was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from command_line import error_of, patcher

import patcher as api
from patcher.bench import load_op
from patcher.bench.judge.call_recording import read_recording, write_recording

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    file = tmp_path_factory.mktemp("recorded") / "mlp.safetensors"
    with torch.inference_mode(), api.recorded(model, "gated_mlp", file):
        model(torch.arange(1, 17).view(2, 8))
    return file


def test_a_shipped_kernel_is_judged_on_what_a_model_was_given(
    recording: Path, tmp_path: Path
) -> None:
    source = load_op("silu_and_mul").folder / "solutions/cpu_simd/silu_and_mul.cpp"
    words = ("evaluate", "silu_and_mul", str(source), "--recorded", str(recording), "--json")
    result = patcher(*words, "--baseline", "eager", "--pairs", "3", cwd=tmp_path)
    told = json.loads(result.stdout)
    assert told["outcome"] in ("correct", "too_slow"), result.stderr or told["checks"]
    [check] = [each for each in told["checks"] if each["name"] == "recorded"]
    assert check["passed"]
    assert "transformers" in check["detail"]


def test_what_was_recorded_is_shown_as_tables_and_as_json(recording: Path, tmp_path: Path) -> None:
    result = patcher("ops", "observe", str(recording), "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["op"], told["point"]) == ("silu_and_mul", "gated_mlp")
    [group] = told["groups"]
    # transformers rounds the activation to bfloat16 before the product
    assert group["finding"] == "coarser"
    assert group["baseline"]["output"] < group["error"]["output"] < 0.01
    assert group["problem"].startswith("output: rmse")
    shown = patcher("ops", "observe", str(recording), cwd=tmp_path)
    assert shown.returncode == 0
    for word in ("coarser", "bfloat16", "[128, 1]", "group 0: output: rmse"):
        assert word in shown.stdout


def test_a_recording_is_not_sent_elsewhere(recording: Path, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text("int x;")
    words = ("evaluate", "silu_and_mul", str(source), "--recorded", str(recording), "--json")
    error = error_of(patcher(*words, "--judge", f"exchange:{tmp_path}", cwd=tmp_path))
    assert error["message"] == "a recording is not sent to a judge elsewhere"


def test_a_header_that_others_wrote_neither_steers_a_terminal_nor_is_markup(
    recording: Path, tmp_path: Path
) -> None:
    contract = load_op("silu_and_mul").contract
    record, calls = read_recording(recording, contract)
    values = {
        each.given or each.made: (call.inputs if each.given else call.outputs)[each.name]
        for call in calls
        for each in call.record.tensors
    }
    refused = tuple(
        call.model_copy(update={"refusal": "no\x1b]0;title\x07 [/red]"}) for call in record.calls
    )
    said = {"device": "[/b] \x1b[2J", "left_out": {"why\x1b[1A": 1}, "calls": refused}
    file = tmp_path / "theirs.safetensors"
    write_recording(file, record.model_copy(update=said), values)
    shown = patcher("ops", "observe", str(file), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    for part in ("[/b] <U+001B>[2J", "<U+0007> [/red]", "why<U+001B>"):
        assert part in " ".join(shown.stdout.split())
