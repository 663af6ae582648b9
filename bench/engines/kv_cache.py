"""What a served decode step uses of a paged KV cache, and what the engine has room for.

A request has whole pages of `block_size` tokens (vLLM's blocks), which its row of the block table
names. The row is as wide as the longest sequence needs that the engine takes: how much a step reads
is in the requests' lengths alone. Read against vLLM 0.25.1 to 0.33.0: `MultiGroupBlockTable`
(v1/worker/block_table.py), `may_reinitialize_input_batch` (v1/worker/gpu_model_runner.py),
`initialize_kv_cache` (v1/worker/gpu/model_runner.py), `max_num_blocks_per_req`
(v1/kv_cache_interface.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patcher.bench.engines.architecture import published_config, text_part
from patcher.bench.presets import presets
from patcher.bench.workload import Workload

ALIGNED_TOKENS = {"vllm": 128}
"""Engines whose block table is as wide as their longest sequence needs, and the tokens that a row
is rounded up to (in vLLM since TRT-LLM's kernels ask for it)."""

SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "openai_privacy_filter")
"""Models (`model_type`) whose every layer has attention sinks, which config.json does not say."""


@dataclass(frozen=True)
class DecodeCache:
    """The cache of the decode steps of one workload; lengths are those of a request in tokens, the
    step's new one included."""

    batch: int
    """Requests of a step."""
    block_size: int
    """Tokens of a page."""
    shortest: int
    """Length in the first step."""
    middle: int
    """Length in the middle of the output."""
    longest: int
    """Length in the last step."""

    def pages_of(self, tokens: int) -> int:
        """Pages that a request of that length has."""
        return -(-tokens // self.block_size)

    @property
    def pages(self) -> int:
        """Pages of a request in the middle of the output."""
        return self.pages_of(self.middle)

    @property
    def span(self) -> str:
        """What a request has from the first step to the last, in words."""
        ends = dict.fromkeys((self.shortest, self.longest))
        pages = dict.fromkeys(map(self.pages_of, ends))
        tokens, each = (" to ".join(f"{size:,}" for size in sizes) for sizes in (ends, pages))
        return f"{tokens} tokens ({each} page{'' if each == '1' else 's'} of {self.block_size})"


def decode_cache(workload: Workload, block_size: int) -> DecodeCache:
    """What the decode steps of a workload use. Prefill has left the prompt in the cache."""
    prompt, steps = workload.input_len, workload.output_len
    return DecodeCache(
        batch=workload.batch,
        block_size=block_size,
        shortest=prompt + 1,
        middle=prompt + (steps + 1) // 2,
        longest=prompt + steps,
    )


def table_width(engine: str, max_model_len: int, block_size: int, shards: int = 1) -> int | None:
    """Entries of a row of the engine's block table, for a cache of keys and values; None if the
    engine has no such table.

    In vLLM before 0.28.0 a row is rounded otherwise for a block size that neither divides 128 nor
    is a multiple of it.

    Args:
        max_model_len: tokens of the longest sequence that the engine takes.
        block_size: tokens of a block.
        shards: ranks that share the cache of a request (`decode_context_parallel_size`).
    """
    if engine not in ALIGNED_TOKENS:
        return None
    blocks = -(-max_model_len // (block_size * shards))
    aligned = ALIGNED_TOKENS[engine] // math.gcd(ALIGNED_TOKENS[engine], block_size)
    return -(-blocks // aligned) * aligned


@dataclass(frozen=True)
class CachedAttention:
    """Sizes of a model's attention beside heads of keys and values, as its config.json has them."""

    heads: int | None = None
    """Query heads of a layer; None: not stated, as are other sizes."""
    latent: int | None = None
    """With latent attention (MLA): numbers of a cached row that are key and value."""
    rope: int | None = None
    """Those behind them, which are key alone."""
    window: int = 0
    """Tokens that layers with a sliding window attend to; 0: no layer has one."""
    sinks: int = 0
    """1 if the softmax of each layer has a score more for each head, else 0."""


def cached_attention(model: str) -> CachedAttention:
    """Those of a model. Raises as `published_config`."""
    known = presets().get(model)
    if known is None:
        return stated_attention(published_config(model))
    # a preset says it without transformers
    return stated_attention({"model_type": known.architecture, **known.config})


def stated_attention(config: Mapping[str, Any]) -> CachedAttention:
    """Those that a config.json states."""
    text = text_part(config)
    windows = text.get("use_sliding_window") is not False
    return CachedAttention(
        heads=text.get("num_attention_heads"),
        latent=text.get("kv_lora_rank"),
        rope=text.get("qk_rope_head_dim"),
        window=(text.get("sliding_window") or 0) if windows else 0,
        sinks=int((text.get("model_type") or config.get("model_type")) in SINKS),
    )
