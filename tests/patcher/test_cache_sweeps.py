"""Sweeps of ops over a paged KV cache: the lengths of the served model's own requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import patcher

from patcher import sweeps
from patcher.bench import UsageError, Workload, load_op
from patcher.bench.engines.kv_cache import decode_cache
from patcher.bench.judge.planning import require_fits
from patcher.sweeps import place_of, served_sweep
from patcher.workloads import workload_for

ATTENTION, LATENT = load_op("decode_attention"), load_op("mla_decode")


def served(model: str, **traffic: int) -> Workload:
    return workload_for(model, "cuda", engine="vllm", **traffic)


@pytest.mark.parametrize(
    ("op", "model", "traffic", "name"),
    [
        (
            ATTENTION,
            "qwen3-30b-a3b-fp8",
            {},
            "bf16@kv_heads=4,head_dim=128,blocks=4224,pages=66,sinked=0",
        ),
        (
            ATTENTION,
            "qwen3-30b-a3b-fp8",
            {"input_len": 256, "output_len": 512, "batch": 12},
            "bf16@kv_heads=4,head_dim=128,blocks=2048,pages=32,sinked=0,tokens=1:4:8:12:16:32:64",
        ),
        (ATTENTION, "gpt-oss-20b", {}, "bf16@blocks=4224,pages=66"),
        (
            ATTENTION,
            "gpt-oss-20b",
            {"input_len": 256, "output_len": 512, "batch": 12},
            "bf16@blocks=2048,pages=32,tokens=1:4:8:12:16:32:64",
        ),
        (LATENT, "glm-4.7-flash", {}, "bf16@heads=20,blocks=1088,pages=17"),
        (LATENT, "deepseek-v3-cut", {"input_len": 8192}, "bf16@blocks=8256,pages=129"),
    ],
)
def test_sizes_are_the_models_and_lengths_the_workloads(
    op: Any, model: str, traffic: dict[str, int], name: str
) -> None:
    workload = served(model, **traffic)
    assert served_sweep(op, "cuda", None, workload) == name
    sweep = op.sweep("cuda", name)
    cache = decode_cache(workload, sweep.fixed["block_size"])
    assert sweep.fixed["pages"] == cache.pages
    for point in sweep.points():
        assert point.axes["blocks"] >= point.axes["tokens"] * cache.pages, "pages of its own"
    assert workload.batch in sweep.values
    require_fits(op, sweep, "cpu")


def test_what_the_user_names_holds() -> None:
    workload = served("qwen3-8b")
    own = "dense@pages=8"
    assert served_sweep(ATTENTION, "cuda", own, workload) == own
    assert served_sweep(ATTENTION, "cuda", None, None) is None
    assert served_sweep(ATTENTION, "cuda", "dense", workload) == "dense@blocks=4224,pages=66"
    windowed = served_sweep(ATTENTION, "cuda", "bf16-window", served("gpt-oss-20b"))
    assert windowed == "bf16-window@blocks=4224,pages=66"


@pytest.mark.parametrize(
    ("input_len", "batches"),
    [(2048, (1, 4, 8, 16, 32, 64)), (4096, (1, 4, 8, 16, 32)), (16384, (1, 4, 8))],
)
def test_batches_that_the_judge_cannot_send_are_left_out(
    input_len: int, batches: tuple[int, ...]
) -> None:
    name = served_sweep(ATTENTION, "cuda", None, served("llama-3.1-8b", input_len=input_len))
    sweep = ATTENTION.sweep("cuda", name)
    assert sweep.values == batches
    assert sweep.fixed["blocks"] == batches[-1] * sweep.fixed["pages"]
    require_fits(ATTENTION, sweep, "cpu")


def test_the_served_batch_is_never_left_out() -> None:
    name = served_sweep(ATTENTION, "cuda", None, served("llama-3.1-8b", input_len=32768))
    sweep = ATTENTION.sweep("cuda", name)
    assert sweep.values == (1, 4, 8)
    with pytest.raises(UsageError, match="is too large to be judged"):
        require_fits(ATTENTION, sweep, "cpu")


@pytest.mark.parametrize("op", [ATTENTION, LATENT], ids=lambda op: op.name)
def test_inputs_have_requests_of_that_length(op: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    traffic = {"batch": 3, "input_len": 100, "output_len": 24}
    workload = workload_for(str(tmp_path), "cpu", engine="vllm", **traffic)
    sweep = op.sweep("cpu", served_sweep(op, "cpu", None, workload))
    [point] = [each for each in sweep.points() if each.axes["tokens"] == 3]
    found = op.inputs.make(point, torch.Generator().manual_seed(0), "normal")
    cache = decode_cache(workload, sweep.fixed["block_size"])
    assert cache.middle == 112
    assert all(cache.pages_of(int(length)) == cache.pages for length in found["lengths"])
    table = found["block_table"]
    assert len(table.unique()) == table.numel(), "pages of its own"


def test_a_place_says_what_is_judged_and_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str | None] = []

    def counting(*asked: Any) -> str | None:
        counted.append(served_sweep(*asked))
        return counted[-1]

    monkeypatch.setattr(sweeps, "served_sweep", counting)
    place = place_of(ATTENTION, "cuda", None, served("qwen3-8b"))
    assert counted == [place.sweep], "it is worked out once"
    assert place.sweep == "bf16@group=4,head_dim=128,blocks=4224,pages=66,sinked=0"
    assert "; blocks 4,224; block_size 16; pages 66; windowed 0; sinked 0; " in place.said
    assert place.said.endswith(
        "; served requests have 1,025 to 1,088 tokens (65 to 68 pages of 16) of a table with room "
        "for at least 256"
    )


def test_optimize_takes_the_traffic_of_a_served_model(tmp_path: Path) -> None:
    asks = f"exchange:{tmp_path / 'prompts'}"
    words = ("optimize", "rms_norm", "--language", "cpp", "--model", asks, "--input-len", "9")
    done = patcher(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "--input-len is of a served model" in done.stderr
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    config |= {"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    traffic = ("--input-len", "100", "--output-len", "24", "--batch", "3")
    op = ("optimize", "decode_attention", "--language", "cpp", "--model", asks)
    of = ("--served", str(tmp_path), "--engine", "vllm")
    done = patcher(*op, *of, *traffic, cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert "judged at tokens 1, 2, 3, 4, 8, 16; " in said
    assert "served requests have 101 to 124 tokens (7 to 8 pages of 16)" in said
    [prompt] = (tmp_path / "prompts").glob("*.prompt.md")
    assert "blocks=112,pages=7" in prompt.read_text(encoding="utf-8")
