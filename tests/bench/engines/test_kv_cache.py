"""What decode steps use of a paged cache, and what a model's config.json says of its attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from patcher.bench import Workload, load_ops
from patcher.bench.engines.kv_cache import (
    CachedAttention,
    cached_attention,
    decode_cache,
    stated_attention,
    table_width,
)
from patcher.bench.engines.served_axes import served_axes
from patcher.integrate.vllm.points import POINTS


def workload(input_len: int, output_len: int) -> Workload:
    return Workload(
        model="qwen3-8b",
        engine="vllm",
        device="cuda",
        dtype="bfloat16",
        batch=8,
        input_len=input_len,
        output_len=output_len,
    )


@pytest.mark.parametrize(
    ("input_len", "output_len", "lengths", "pages", "span"),
    [
        (1024, 64, (1025, 1056, 1088), 66, "1,025 to 1,088 tokens (65 to 68 pages of 16)"),
        (1024, 1, (1025, 1025, 1025), 65, "1,025 tokens (65 pages of 16)"),
        (128, 2048, (129, 1152, 2176), 72, "129 to 2,176 tokens (9 to 136 pages of 16)"),
        (1, 2, (2, 2, 3), 1, "2 to 3 tokens (1 page of 16)"),
    ],
)
def test_lengths_are_those_of_the_steps(
    input_len: int, output_len: int, lengths: tuple[int, int, int], pages: int, span: str
) -> None:
    found = decode_cache(workload(input_len, output_len), 16)
    assert (found.shortest, found.middle, found.longest) == lengths
    assert (found.batch, found.pages, found.span) == (8, pages, span)
    steps = [input_len + step for step in range(1, output_len + 1)]
    assert abs(found.middle - sum(steps) / output_len) <= 0.5


def test_a_row_of_the_table_is_as_wide_as_the_longest_sequence_needs() -> None:
    assert table_width("vllm", 4096, 16) == 256, "as receipts of Qwen3-30B-A3B fp8 have it"
    assert table_width("vllm", 3136, 16) == 200
    assert table_width("vllm", 4096, 16, shards=2) == 128
    assert table_width("transformers", 4096, 16) is None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "gpt_oss", "sliding_window": 128}, {"window": 128, "sinks": 1}),
        ({"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"text_config": {"model_type": "gemma3_text", "sliding_window": 512}}, {"window": 512}),
        ({"num_attention_heads": 20, "kv_lora_rank": 512}, {"heads": 20, "latent": 512}),
    ],
)
def test_a_config_says_it(config: dict[str, Any], found: dict[str, int], tmp_path: Path) -> None:
    assert stated_attention(config) == CachedAttention(**found)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert cached_attention(str(tmp_path)) == CachedAttention(**found)


def test_presets_say_it() -> None:
    assert cached_attention("gpt-oss-20b") == CachedAttention(heads=64, window=128, sinks=1)
    assert cached_attention("deepseek-v3-cut") == CachedAttention(heads=128, latent=512, rope=64)


def test_axes_are_those_of_the_contracts() -> None:
    """Every op of vLLM's that reads a block table is known, and none that does not."""
    known = {point.op for point in POINTS.values()}
    for name, op in load_ops().items():
        names = served_axes(name)
        tables = [tensor for tensor in op.contract.tensors if tensor.name == "block_table"]
        assert (names is not None) == bool(tables), name
        if names is None:
            continue
        assert name in known
        [table] = tables
        assert table.shape == (names.batch, names.pages)
        for sweep in op.contract.sweeps:
            assert sweep.axis == names.batch
            assert names.axes - {names.batch} <= sweep.fixed.keys()
        assert set(names.model.values()) <= set(CachedAttention.__dataclass_fields__)
        if names.windowed:
            assert names.window == op.inputs.WINDOW
