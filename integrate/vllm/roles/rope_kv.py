"""gpt-oss attention in vLLM: rotary embedding and the write to the paged KV cache, in one call.

vLLM rotates in compiled code and writes in a separate operator, `vllm::unified_kv_cache_update`,
which finds a layer's cache and slots by its name. The patched `OAIAttention.forward` passes query,
key and value from the projection to one operator that does both. It then calls
`vllm::unified_attention_with_output`, as `Attention.forward` does.

If vLLM splits its graphs at the write (piecewise mode), it must also split at this operator, since
Python looks up the slots and does not run during replay. The patched `should_split` does that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch, remove_all

_MODEL = "vllm.model_executor.models.gpt_oss"
_ATTENTION = "vllm.model_executor.layers.attention.attention"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_ROTARY = "vllm.model_executor.layers.rotary_embedding.base"
_BACKENDS = "vllm.compilation.backends"
_WRITE = "vllm::unified_kv_cache_update"


class RopeKvUpdate(VllmPoint):
    """Layers of `OAIAttention` built while it is installed, with FlashAttention's own cache."""

    name: ClassVar[str] = "rope_kv"
    op: ClassVar[str] = "rope_kv_update"
    layers: ClassVar[tuple[str, ...]] = ("OAIAttention",)
    parts: ClassVar[tuple[str, ...]] = (
        f"{_MODEL}:OAIAttention.__init__",
        f"{_MODEL}:OAIAttention.forward",
        f"{_ATTENTION}:Attention.__init__",
        f"{_ATTENTION}:Attention.forward",
        f"{_ATTENTION}:get_attention_context",
        f"{_ATTENTION}:unified_kv_cache_update",
        f"{_ATTENTION}:unified_attention_with_output",
        f"{_FLASH}:FlashAttentionImpl.do_kv_cache_update",
        f"{_ROTARY}:RotaryEmbeddingBase",
        f"{_ROTARY}:RotaryEmbedding",
        f"{_BACKENDS}:split_graph",
        "vllm.compilation.partition_rules:should_split",
        "vllm.config.compilation:CompilationConfig.set_splitting_ops_for_v1",
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._library: Any = None

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        for swap in self._targets():
            swap.must_be_the_engines()
        return f"{_MODEL}.OAIAttention.forward"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        # weak references to rotations by layer name, since the model may be freed before the patch
        layers: dict[str, Any] = {}
        operator = self._register(kernel, layers)
        init, forward, should_split = self._swaps = self._targets()
        init.install(_remembering(init.original, layers, kernel))
        forward.install(_forward(forward.original, layers, operator))
        should_split.install(_split_there(should_split.original, operator))

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_MODEL).OAIAttention)

    def applies(self, layer: Any) -> str | None:
        return _refusal(layer)

    def remove(self) -> None:
        swaps, self._swaps = self._swaps, []
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
        remove_all(swaps)

    def _targets(self) -> list[AttributePatch]:
        attention = sources.module(_MODEL).OAIAttention
        return [
            AttributePatch(attention, "__init__"),
            AttributePatch(attention, "forward"),
            AttributePatch(sources.module(_BACKENDS), "should_split"),
        ]

    def _register(self, kernel: Dispatcher, layers: dict[str, Any]) -> Any:
        """Register `patcher::rope_kv_update_<digest>`, which takes a layer's name like vLLM's."""
        torch_utils = sources.module("vllm.utils.torch_utils")
        run = _update(kernel, layers)

        def fake(positions: Any, query: Any, key: Any, value: Any, layer_name: Any) -> Any:
            return torch.empty(0, device=key.device, dtype=key.dtype)

        # the schema is built from these; vLLM would look up names in quotes
        run.__annotations__ = {
            **dict.fromkeys(("positions", "query", "key", "value"), torch.Tensor),
            **{"layer_name": torch_utils.LayerNameType, "return": torch.Tensor},
        }
        name = f"{self.op}_{kernel.book.digest[:12]}"
        self._library = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]
        torch_utils.direct_register_custom_op(
            op_name=name,
            op_func=run,
            mutates_args=["query", "key"],
            fake_impl=fake,
            target_lib=self._library,
            dispatch_key="CompositeExplicitAutograd",
        )
        return getattr(torch.ops.patcher, name)


def _remembering(original: Any, layers: dict[str, Any], kernel: Dispatcher) -> Any:
    """An `__init__` that collects the layers whose rotation and cache match the contract."""

    def __init__(layer: Any, *args: Any, **more: Any) -> None:
        original(layer, *args, **more)
        refusal = _refusal(layer)
        if refusal is None:
            layers[layer.attn.layer_name] = weakref.ref(layer.rotary_emb)
        else:
            layers.pop(layer.attn.layer_name, None)
            kernel.book.reasons[refusal] += 1

    return __init__


def _refusal(layer: Any) -> str | None:
    """Why a layer stays unpatched, decided once when it is built; None if it is patched."""
    attention, rotary = layer.attn, layer.rotary_emb
    if type(attention.impl) is not sources.module(_FLASH).FlashAttentionImpl:
        return f"attention by {type(attention.impl).__name__}"
    if attention.use_direct_call or attention.kv_sharing_target_layer_name is not None:
        return "a shared or direct KV cache"
    if engine.bypasses_kv_update(attention):
        return "a KV cache that the model writes itself"
    if attention.kv_cache_dtype not in ("auto", "bfloat16") or attention.query_quant is not None:
        return f"KV cache of {attention.kv_cache_dtype}"
    if engine.calculates_kv_scales(attention) or attention.attn_type != "decoder":
        return "another kind of attention"
    if not rotary.is_neox_style or rotary.rotary_dim != rotary.head_size:
        return "another kind of rotation"
    return None


def _forward(original: Any, layers: dict[str, Any], operator: Any) -> Any:
    encode = sources.module("vllm.utils.torch_utils")._encode_layer_name

    def forward(layer: Any, hidden_states: torch.Tensor, positions: torch.Tensor) -> Any:
        attention = layer.attn
        if attention.layer_name not in layers:
            return original(layer, hidden_states, positions)
        qkv, _ = layer.qkv_proj(hidden_states)
        query, key, value = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        name = encode(attention.layer_name)
        query = query.view(-1, attention.num_heads, attention.head_size)
        key = key.view(-1, attention.num_kv_heads, attention.head_size)
        value = value.view(-1, attention.num_kv_heads, attention.head_size)
        # an operation between the two operators would make piecewise mode record an empty graph
        shaped = output.view(-1, attention.num_heads, attention.head_size)
        written = operator(positions, query, key, value, name)
        torch.ops.vllm.unified_attention_with_output(
            query,
            key,
            value,
            shaped,
            name,
            kv_cache_dummy_dep=written,
        )
        result, _ = layer.o_proj(output)
        return result

    return forward


def _update(kernel: Dispatcher, layers: dict[str, Any]) -> Any:
    """The operator: rotate and write, with the patched kernel or else with vLLM's two."""
    torch_utils = sources.module("vllm.utils.torch_utils")
    context = sources.module(_ATTENTION).get_attention_context
    tables: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
    rotate = _rotation()

    def run(positions: Any, query: Any, key: Any, value: Any, layer_name: Any) -> Any:
        name = torch_utils._resolve_layer_name(layer_name)
        _, attention, cache, slots = context(name)
        rotary = layers[name]()
        table = tables.get(rotary)
        if table is None or table.dtype != query.dtype:
            # vLLM rounds cosines and sines to the model's dtype; its own way of storing them
            # would free the buffer that recorded graphs read
            table = tables[rotary] = rotary.cos_sin_cache.to(query.device, query.dtype)
        flat = query.flatten(1), key.flatten(1), value.flatten(1)
        positions = positions.flatten()
        caches = None if slots is None else engine.kv_caches(cache, attention.head_size)
        if caches is None:
            kernel.book.reasons["no KV cache yet"] += 1
        elif kernel(positions, *flat, flat[0].new_empty(0), table, slots, *caches):
            return torch.empty(0, device=cache.device, dtype=cache.dtype)
        rotate(positions, flat[0], flat[1], rotary, table)
        if slots is not None:
            attention.impl.do_kv_cache_update(attention, key, value, cache, slots)
        return torch.empty(0, device=cache.device, dtype=cache.dtype)

    return run


def _rotation() -> Callable[..., None]:
    """vLLM's own rotation, in place on query and key [tokens, heads * head_dim]."""
    platform = sources.module("vllm.platforms").current_platform
    kernels = sources.module("vllm._custom_ops")

    def by_kernel(positions: Any, query: Any, key: Any, rotary: Any, table: Any) -> None:
        kernels.rotary_embedding(positions, query, key, rotary.head_size, table, True)

    def by_torch(positions: Any, query: Any, key: Any, rotary: Any, table: Any) -> None:
        rotated = rotary.forward_static(
            positions, query, key, rotary.head_size, rotary.rotary_dim, table, True
        )
        query.copy_(rotated[0])
        key.copy_(rotated[1])

    return by_kernel if platform.is_cuda() else by_torch


def _split_there(original: Any, operator: Any) -> Any:
    def should_split(node: Any, splitting_ops: list[str]) -> bool:
        target: Any = node.target
        if node.op == "call_function" and target in (operator, operator.default):
            return _WRITE in splitting_ops
        return bool(original(node, splitting_ops))

    return should_split
