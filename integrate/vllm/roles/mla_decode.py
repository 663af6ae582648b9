"""Latent attention of decode steps: `forward_mqa` of vLLM's dense backends on Hopper.

vLLM calls it for a step's requests in decode alone, whose tables lie apart in the metadata. With
one new token of each, as the op has it, there are as many rows as requests; rows of speculation
stay with the engine. See `decode_attention` for graphs that also serve mixed steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LAYER = "vllm.model_executor.layers.attention.mla_attention"
_FOLDER = "vllm.v1.attention.backends.mla"
_IMPLS = (
    f"{_FOLDER}.flashattn_mla:FlashAttnMLAImpl",
    f"{_FOLDER}.flashmla:FlashMLAImpl",
    f"{_FOLDER}.triton_mla:TritonMLAImpl",
)


class MlaDecode(VllmPoint):
    """Layers whose heads share one latent row of the cache for each position."""

    name: ClassVar[str] = "mla_decode"
    op: ClassVar[str] = "mla_decode"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LAYER}:MLACommonDecodeMetadata",
        *(f"{impl}.forward_mqa" for impl in _IMPLS),
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        places = _places()
        for place in places:
            place.must_be_the_engines()
        engine.must_allow_another("attention")
        engine.must_not_record_mixed_steps()
        return f"forward_mqa of {', '.join(place.owner.__name__ for place in places)}"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_LAYER).MLAAttention)

    def applies(self, layer: Any) -> str | None:
        return _unlike(layer.impl, [place.owner for place in _places()])

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        for place in _places():
            place.install(_replacement(place, kernel))
            self._swaps.append(place)


def _places() -> list[AttributePatch]:
    return [AttributePatch(sources.part(impl), "forward_mqa") for impl in _IMPLS]


def _unlike(impl: Any, kinds: Sequence[Any]) -> str | None:
    """Why a layer's attention is not that of the contract; None if it is."""
    if type(impl) not in kinds:
        return f"attention by {type(impl).__name__}"
    if impl.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        return f"KV cache of {impl.kv_cache_dtype}"
    shares = impl.dcp_world_size > 1 or impl.need_to_return_lse_for_decode
    return "decode context parallelism" if shares else None


def _replacement(place: AttributePatch, kernel: Dispatcher) -> Any:
    original, kinds = place.original, [place.owner]

    def forward_mqa(
        impl: Any, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        decode, parts = attn_metadata.decode, q if isinstance(q, tuple) else (q,)
        reason = _unlike(impl, kinds)
        if len(parts[0]) != len(decode.seq_lens):
            reason = reason or "more than one token of a request"
        if reason is None:
            query = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            out = query.new_empty((*query.shape[:2], impl.kv_lora_rank))
            cache, tables = kv_c_and_k_pe_cache, (decode.block_table, decode.seq_lens)
            if kernel(query, cache, *tables, out, impl.scale):
                return out, None
        else:
            kernel.book.reasons[reason] += 1
        found: tuple[torch.Tensor, torch.Tensor | None] = original(
            impl, q, kv_c_and_k_pe_cache, attn_metadata, layer
        )
        kernel.left(found[0])
        return found

    return forward_mqa
