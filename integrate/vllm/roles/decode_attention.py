"""Attention of decode steps: `FlashAttentionImpl.forward` where each request has one new token.

FlashAttention also serves prefill, and steps that mix both; those stay with it. Whether a step is
one of decode is in its metadata, which Python sees when it runs, or when a graph of decode steps is
recorded. A graph of mixed steps is recorded with one token a request too, so that an engine which
replays such graphs (`cudagraph_mode` FULL) is refused.

A layer belongs to the point of its cache's dtype; several points may be in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles.rope_operator import ATTENTION, FLASH, PLAIN, refusal
from patcher.integrate.vllm.swap import SharedPatch


class DecodeAttention(VllmPoint):
    """Decoder layers with FlashAttention's own cache, a causal mask, and perhaps a window."""

    name: ClassVar[str] = "decode_attention"
    op: ClassVar[str] = "decode_attention"
    parts: ClassVar[tuple[str, ...]] = (
        f"{FLASH}:FlashAttentionImpl.__init__",
        f"{FLASH}:FlashAttentionImpl.forward",
        f"{FLASH}:FlashAttentionMetadata",
        f"{FLASH}:FlashAttentionMetadataBuilder.build",
    )
    dtypes: ClassVar[tuple[str, ...]] = PLAIN
    """The `kv_cache_dtype` of its layers."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        self._place().must_have_room()
        engine.must_allow_another("attention")
        engine.must_not_record_mixed_steps()
        return f"{FLASH}.FlashAttentionImpl.forward"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(ATTENTION).Attention)

    def applies(self, layer: Any) -> str | None:
        return self.unlike(layer) or _unlike(layer.impl)

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = self._place()
        place.install(_Part(self, kernel))
        self._swaps = [place]

    def unlike(self, layer: Any) -> str | None:
        """Why a layer's cache is not that of the contract; None if it is."""
        return refusal(layer)

    def arguments(
        self, layer: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What the contract has before the block table.

        Args:
            layer: the `Attention` layer.
            query: [tokens, heads * head_dim].
            keys: the cache, [blocks, block_size, kv_heads, head_dim]; `values` alike.
        """
        return query, keys, values

    def _place(self) -> SharedPatch:
        return SharedPatch(sources.module(FLASH).FlashAttentionImpl, "forward", self.name, _sharing)


def _unlike(impl: Any) -> str | None:
    """Why a layer's attention is not that of the contract; None if it is."""
    if impl.alibi_slopes is not None or impl.logits_soft_cap:
        return "scores with a slope or a cap"
    return None if impl.sliding_window[1] in (-1, 0) else "a window to both sides"


def _other_step(metadata: Any, output_scale: Any, output_block_scale: Any) -> str | None:
    """Why a step is not one of decode alone; None if it is."""
    if metadata is None:
        return "no KV cache yet"
    if metadata.max_query_len != 1 or metadata.num_actual_tokens > len(metadata.seq_lens):
        return "more than one token of a request"
    if metadata.causal is not True or getattr(metadata, "use_cascade", False):
        return "another kind of mask, or a cascade"
    if output_scale is not None or output_block_scale is not None:
        return "a quantised output"
    special = ("rswa_prefix_lens", "mm_prefix_range_tensor", "mm_prefix_query_range_tensor")
    if any(getattr(metadata, name, None) is not None for name in special):
        return "a mask of its own"
    return None


class _Part:
    """One point's share of the replacement."""

    def __init__(self, point: DecodeAttention, kernel: Dispatcher) -> None:
        self.point, self._kernel, self._windows = point, kernel, _Windows()

    def ran(
        self,
        reason: str | None,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> bool:
        """Whether the kernel has written the output; if not, why is counted.

        Args:
            reason: why the step is not one of decode alone; None if it is.
            layer: the `Attention` layer.
            query: [tokens, heads, head_dim], with padding beyond the step's tokens.
            kv_cache: the layer's, as the engine has it.
            metadata: FlashAttention's, of the step.
            output: as the query.
        """
        impl = layer.impl
        reason = reason or self.point.applies(layer)
        caches = None if reason else engine.kv_caches(kv_cache, query.shape[-1])
        if caches is None:
            self._kernel.book.reasons[reason or "no KV cache yet"] += 1
            return False
        tokens = metadata.num_actual_tokens
        return self._kernel(
            *self.point.arguments(layer, query[:tokens].flatten(1), *caches),
            metadata.block_table[:tokens],
            metadata.seq_lens[:tokens],
            self._windows.of(engine.window_of(impl, metadata), query.device),
            output.new_empty(0) if impl.sinks is None else impl.sinks.data,
            output[:tokens].view(tokens, -1),
            impl.scale,
        )

    def left(self) -> None:
        """Tell that the engine's own code has written the output."""
        self._kernel.left()


def _sharing(original: Any, parts: Mapping[str, _Part]) -> Any:
    def forward(
        impl: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        reason = _other_step(attn_metadata, output_scale, output_block_scale)
        part = _part_of(layer, parts)
        if part.ran(reason, layer, query, kv_cache, attn_metadata, output):
            return output
        found: torch.Tensor = original(
            impl,
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        part.left()
        return found

    return forward


def _part_of(layer: Any, parts: Mapping[str, _Part]) -> _Part:
    """That of the layer's cache; if none is, any, which counts why the layer stays."""
    first, *others = parts.values()
    dtype = layer.kv_cache_dtype
    return next((part for part in others if dtype in part.point.dtypes), first)


class _Windows:
    """The size of a window as a tensor, one for each size and device."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, size: int, device: torch.device) -> torch.Tensor:
        """int32, [1]; or [0] for a size of 0, which means none."""
        if (size, device) not in self._kept:
            # outside of a step's graph, where its memory could be another tensor's in replay:
            # vLLM runs every size before it records it
            values = [size] if size else []
            self._kept[size, device] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._kept[size, device]
