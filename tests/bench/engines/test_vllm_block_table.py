"""The width of a block table, as the real vLLM makes it on the CPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_here import needs_vllm

from patcher.bench.engines.kv_cache import table_width


def blocks_per_request(block_size: int, max_model_len: int) -> int:
    """What a cache of keys and values asks for, by a method that 0.25.1 has not yet."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=4, head_size=128, dtype=torch.bfloat16
    )
    if not hasattr(spec, "max_num_blocks_per_req"):
        return -(-max_model_len // block_size)
    one_rank = SimpleNamespace(decode_context_parallel_size=1)
    found: int = spec.max_num_blocks_per_req(
        SimpleNamespace(parallel_config=one_rank), max_model_len
    )
    return found


@needs_vllm
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("max_model_len", [1, 1000, 3136, 4096, 131072])
def test_the_width_is_that_of_vllm(block_size: int, max_model_len: int) -> None:
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    known: dict[str, Any] = {
        "max_num_reqs": 2,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": 8,
        "pin_memory": False,
        "device": torch.device("cpu"),
        "block_sizes": [block_size],
        "kernel_block_sizes": [block_size],
        "max_num_blocks": [blocks_per_request(block_size, max_model_len)],
    }
    taken = inspect.signature(MultiGroupBlockTable).parameters
    tables = MultiGroupBlockTable(**{name: one for name, one in known.items() if name in taken})
    width = tables[0].get_device_tensor(1).shape[1]
    assert table_width("vllm", max_model_len, block_size) == width
