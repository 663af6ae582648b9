"""Attention of decode steps over a KV cache in fp8, in the place of `decode_attention`.

vLLM's `Attention.forward` rounds the query to fp8 by a scale of its own before, where the kernel
that FlashAttention has there wants it so (Hopper's does); the point takes the query as it comes.
Keys and values have one scale each. The engine writes the cache: `rope_kv` and `qkv_rope_kv` leave
such layers to it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

from patcher.integrate.vllm import sources
from patcher.integrate.vllm.roles.decode_attention import DecodeAttention
from patcher.integrate.vllm.roles.rope_operator import ATTENTION, other_cache


class DecodeAttentionFp8(DecodeAttention):
    """Layers of `DecodeAttention` whose cache is float8_e4m3fn with a scale of the whole tensor."""

    name: ClassVar[str] = "decode_attention.fp8"
    op: ClassVar[str] = "decode_attention_fp8"
    parts: ClassVar[tuple[str, ...]] = (*DecodeAttention.parts, f"{ATTENTION}:Attention.forward")
    dtypes: ClassVar[tuple[str, ...]] = ("fp8", "fp8_e4m3")

    def unlike(self, layer: Any) -> str | None:
        reason = other_cache(layer, self.dtypes)
        scales = layer._q_scale, layer._k_scale, layer._v_scale
        several = any(scale.numel() != 1 for scale in scales)
        return reason or ("a KV cache with a scale of each head" if several else None)

    def arguments(
        self, layer: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # vLLM allocates bytes, and measures its scales at most once, in the same tensors
        stored = _stored()
        return (
            query,
            keys.view(stored),
            values.view(stored),
            layer._q_scale.view(1) if query.dtype == stored else layer._k_scale.new_empty(0),
            layer._k_scale.view(1),
            layer._v_scale.view(1),
        )


@cache
def _stored() -> torch.dtype:
    """What the platform calls fp8."""
    found: torch.dtype = sources.module("vllm.platforms").current_platform.fp8_dtype()
    return found
