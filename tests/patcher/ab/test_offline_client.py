"""vLLM's own offline benchmarks, from its wheels, with a double of its engine (`make engines`)."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from served_sample import needs_the_real
from vllm_llm_double import TOKEN_S

from patcher.ab import offline, served
from patcher.ab.served import compare_served
from patcher.ab.served_records import ServedJob, SideSetup
from patcher.bench import Workload
from patcher.bench.ab.phases import silent
from patcher.bench.ab.served import ServedPoint
from patcher.bench.engines.serving import clients

SUPPORT = Path(__file__).parents[2] / "support"
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 12000,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", sorted(name for name, one in clients().items() if one.offline is not None)
)
def test_the_real_benchmark_takes_our_arguments_and_its_result_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parser, its prompts, its warm-up and its file; not how fast it was."""
    own = clients()[name]
    needs_the_real(own)
    doubles, model, seen = tmp_path / "doubles", tmp_path / "model", tmp_path / "seen"
    doubles.mkdir()
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (doubles / "sitecustomize.py").write_text(
        f"import vllm_doubles, vllm_llm_double\nvllm_llm_double.stand_in({str(seen)!r})\n"
    )
    (doubles / "datasets.py").write_text("load_dataset = None  # of data that is not used\n")
    path = [str(doubles), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, str(SUPPORT)]))
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(offline, "RECEIPTS_S", 0)
    monkeypatch.setattr(served, "compiles", lambda engine: False)
    workload = Workload(
        model=str(model), engine=own.engine, device="cpu", dtype="float32", batch=1, input_len=8,
        output_len=8,
    )  # fmt: skip
    point = ServedPoint(trace="fixed", concurrency=6)
    job = ServedJob(workload, name, own, (point,), process_pairs=1)
    sides = (SideSetup("stock"), SideSetup("other", {"max_num_seqs": 32}))
    result = compare_served(job, sides, tmp_path, silent)
    assert result.header.sides[0].version == importlib.metadata.version(own.package)
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    engines = [line for line in lines if "model" in line]
    calls = [line for line in lines if "lengths" in line]
    assert [one["load_format"] for one in engines] == ["patcher_random"] * 2
    assert engines[1]["max_num_seqs"] == 32
    assert [one["seed"] for one in engines] == [0, 0]
    assert all(one["max_model_len"] >= 1280 for one in engines)
    assert all(one == {"lengths": [1024] * 6, "asked": [256] * 6} for one in calls)
    assert len(calls) == 2 * (10 + 30 if name == "vllm-latency" else 1 + 1)
    for process in result.processes:
        [run] = process.runs
        prompts = 6 * (30 if name == "vllm-latency" else 1)
        assert (run.requests, run.input_tokens, run.output_tokens) == (
            prompts, 1024 * prompts, 256 * prompts,
        )  # fmt: skip
        assert 0 < run.output_tokens_per_s <= 6 / TOKEN_S
        assert run.total_tokens_per_s == pytest.approx(5 * run.output_tokens_per_s)
        assert set(run.batch_ms) == (
            {"p10", "p25", "p50", "p75", "p90", "p99"} if name == "vllm-latency" else set()
        )
