"""SGLang's rotary embedding with the write to its KV cache: `RotaryEmbedding.forward_cuda`.

gpt-oss, Qwen3-MoE and a few others give the rotation the layer's cache
(`fused_set_kv_buffer_arg`): two buffers [slots, kv_heads * head_dim], that is one token a block. A
hybrid cache for sliding windows is never given, so `wants` turns it off. Other models write in
attention; their calls keep SGLang's kernel.

The contract leaves `key` as it is, and SGLang rotates it in place as well. In a decode step
attention reads the cache alone, so only decode steps are taken. Only the function that makes
`fused_set_kv_buffer_arg` is told the kind of step, so it is wrapped wherever a model names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.sglang import sources
from patcher.integrate.sglang.point import SglangPoint
from patcher.integrate.swap import AttributePatch

_ROTARY = "sglang.srt.layers.rotary_embedding.base"
_KERNELS = "sglang.kernels.ops.attention.rope"
_MODELS = "sglang.srt.models.utils"
_MAKES = "create_fused_set_kv_buffer_arg"
_ATTENTION = "sglang.srt.layers.attention"
_DECODES = "patcher_decodes"
"""The attribute of `FusedSetKVBufferArg` that says whether the step is a decode step."""


class SglangRopeKv(SglangPoint):
    """NeoX rotations of whole heads that SGLang gives the cache, in decode steps."""

    name: ClassVar[str] = "rope_kv"
    op: ClassVar[str] = "rope_kv_update"
    wants: ClassVar[Mapping[str, Any]] = {"disable_hybrid_swa_memory": True}
    module: ClassVar[str] = _ROTARY
    owner: ClassVar[str] = "RotaryEmbedding"
    method: ClassVar[str] = "forward_cuda"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_ROTARY}:RotaryEmbedding.__init__",
        f"{_ROTARY}:RotaryEmbedding.forward_cuda",
        f"{_KERNELS}:FusedSetKVBufferArg",
        f"{_KERNELS}:apply_rope_with_cos_sin_cache_inplace",
        f"{_KERNELS}:apply_rope_inplace_with_kvcache",
        f"{_MODELS}:enable_fused_set_kv_buffer",
        f"{_MODELS}:{_MAKES}",
        "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_decode",
        f"{_ATTENTION}.flashattention_backend:FlashAttentionBackend.forward_decode",
        f"{_ATTENTION}.flashinfer_backend:FlashInferAttnBackend.forward_decode",
        f"{_ATTENTION}.triton_backend:TritonAttnBackend.forward_decode",
    )

    def install(self, kernel: Dispatcher) -> None:
        super().install(kernel)
        makes = getattr(sources.module(_MODELS), _MAKES)
        marking = _marking(makes)
        for held in list(sys.modules.values()):
            # models hold it by name; those imported later take it from its module
            if getattr(held, "__dict__", {}).get(_MAKES) is makes:
                swap = AttributePatch(held, _MAKES)
                swap.install(marking)
                self._swaps.append(swap)

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, self._class())

    def applies(self, layer: Any) -> str | None:
        if type(layer).forward_cuda is not self._class().forward_cuda:
            return f"a rotation of class {type(layer).__name__}"
        if layer.use_fallback_kernel:
            return "heads of a size that SGLang does not write while it rotates"
        if not layer.is_neox_style or layer.rotary_dim != layer.head_size:
            return "another kind of rotation"
        return None

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"cos_sin": layer.cos_sin_cache}

    def _replacement(self, kernel: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
        def refusal(layer: Any, offsets: Any, cache: Any) -> str | None:
            if cache is None:
                return "a KV cache that is written in attention"
            if not getattr(cache, _DECODES, False):
                return "not a decode step"
            return "positions with offsets" if offsets is not None else self.applies(layer)

        def forward_cuda(
            layer: Any,
            positions: torch.Tensor,
            query: torch.Tensor,
            key: torch.Tensor,
            offsets: torch.Tensor | None = None,
            fused_set_kv_buffer_arg: Any = None,
        ) -> Any:
            reason = refusal(layer, offsets, fused_set_kv_buffer_arg)
            if reason is not None:
                kernel.book.reasons[reason] += 1
            elif kernel(*_arguments(layer, positions, query, key, fused_set_kv_buffer_arg)):
                return query, key
            return original(layer, positions, query, key, offsets, fused_set_kv_buffer_arg)

        return forward_cuda


def _arguments(
    layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cache: Any
) -> tuple[torch.Tensor, ...]:
    """The contract's tensors; query, key, value and caches as views."""
    tokens, head_dim = positions.shape[0], layer.head_size
    heads = (1, -1, head_dim)
    return (
        positions,
        query.view(tokens, -1),
        key.view(tokens, -1),
        cache.value.view(tokens, -1),
        query.new_empty(0),
        layer.cos_sin_cache,
        cache.cache_loc,
        cache.k_buffer.view(cache.k_buffer.shape[0], *heads),
        cache.v_buffer.view(cache.v_buffer.shape[0], *heads),
    )


def _marking(makes: Callable[..., Any]) -> Callable[..., Any]:
    def create(value: torch.Tensor, layer: Any, forward_batch: Any) -> Any:
        made = makes(value, layer, forward_batch)
        setattr(made, _DECODES, forward_batch.forward_mode.is_decode())
        return made

    return create
