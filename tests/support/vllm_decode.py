"""Steps of decode by FlashAttention's backend, with a double of its kernel."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from vllm_gpu import flash

from patcher import bench
from patcher.bench.runner.loading import load

OP = bench.load_op("decode_attention")
CPU = load(str(OP.folder / "solutions/cpu_torch/decode_attention.py"), "python", OP.name)
LENGTHS = (5, 17, 0)


def put_double(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    """The double in the place of FlashAttention's kernel, under vLLM's own forward."""
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", forward)
    for name in ("flash_attn_varlen_func", "_FA4_DENSE_ATTENTION_KERNEL"):
        if hasattr(flash_attn, name) or name == "flash_attn_varlen_func":
            monkeypatch.setattr(flash_attn, name, flash, raising=False)


def metadata(queries: tuple[int, ...] = (1, 1, 1), **more: Any) -> Any:
    """FlashAttention's of a step with so many new tokens of each request."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    given = {
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "query_start_loc": starts,
        "max_seq_len": max(LENGTHS),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": torch.tensor([[0, 1], [1, 0], [0, 0]], dtype=torch.int32),
        "slot_mapping": torch.zeros(sum(queries), dtype=torch.int64),
        "use_cascade": False,
        "common_prefix_len": 0,
        **dict.fromkeys(("cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")),
        **more,
    }
    known = {each.name for each in fields(FlashAttentionMetadata)}
    return FlashAttentionMetadata(**{name: each for name, each in given.items() if name in known})
