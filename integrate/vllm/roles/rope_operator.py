"""The operator that rotates query and key and writes the KV cache, as vLLM's graphs call it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch.multiprocessing import reductions

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources

ATTENTION = "vllm.model_executor.layers.attention.attention"
FLASH = "vllm.v1.attention.backends.flash_attn"
ROTARY = "vllm.model_executor.layers.rotary_embedding.base"


PLAIN = ("auto", "bfloat16")
"""The `kv_cache_dtype` of layers whose cache is not quantised."""


def refusal(attention: Any) -> str | None:
    """Why an `Attention` layer keeps vLLM's own KV write; None if the operator can do it."""
    if reason := other_cache(attention, PLAIN):
        return reason
    return "another kind of attention" if engine.calculates_kv_scales(attention) else None


def other_cache(attention: Any, dtypes: Collection[str]) -> str | None:
    """Why an `Attention` layer is not a decoder's, by FlashAttention, with a cache of its own; None
    if it is.

    Args:
        attention: the layer.
        dtypes: the `kv_cache_dtype` that its cache may have.
    """
    impl = attention.impl
    if type(impl) is not _flash_attention():
        return f"attention by {type(impl).__name__}"
    if attention.use_direct_call or attention.kv_sharing_target_layer_name is not None:
        return "a shared or direct KV cache"
    if engine.bypasses_kv_update(attention):
        return "a KV cache that the model writes itself"
    if attention.kv_cache_dtype not in dtypes:
        return f"KV cache of {attention.kv_cache_dtype}"
    if attention.attn_type != "decoder":
        return "another kind of attention"
    if attention.head_size_v != attention.head_size:
        return "values of another size"
    # with it, attention reads the key itself beside the cache, and the kernel leaves it as it was
    return None if impl.dcp_world_size == 1 else "decode context parallelism"


@cache
def _flash_attention() -> Any:
    return sources.module(FLASH).FlashAttentionImpl


class RopeKvOperator:
    """`patcher::rope_kv_<digest>`: one for each patch and process.

    It stays registered when the patch is taken out, since graphs that were compiled before still
    call it. Without a kernel it runs vLLM's own rotation and write. A subclass that does more in
    the same place has a prefix and functions of its own.
    """

    prefix: ClassVar[str] = "rope_kv"
    mutates: ClassVar[tuple[str, ...]] = ("query", "key")

    def __init__(self, name: str) -> None:
        """Register it under a name that is not registered yet."""
        self.kernel: Dispatcher | None = None
        """The patched kernel; None while the patch is out."""
        utils = sources.module("vllm.utils.torch_utils")
        self._resolve = utils._resolve_layer_name
        self._context = sources.module(ATTENTION).get_attention_context
        self._tables = RoundedTables()
        self._rotate = engines_rotation()
        self._library = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]

        run, fake = self._functions()
        # the schema is built from these; vLLM would look up names in quotes
        names = run.__code__.co_varnames[: run.__code__.co_argcount - 1]
        run.__annotations__ = {
            **dict.fromkeys(names, torch.Tensor),
            **{"layer_name": utils.LayerNameType, "return": torch.Tensor},
        }
        utils.direct_register_custom_op(
            op_name=name,
            op_func=run,
            mutates_args=list(self.mutates),
            fake_impl=fake,
            target_lib=self._library,
            dispatch_key="CompositeExplicitAutograd",
        )
        self.overload = getattr(torch.ops.patcher, name).default
        self.name = f"patcher::{name}"

    def _functions(self) -> tuple[Any, Callable[..., torch.Tensor]]:
        """The operator's function, whose arguments but the last are tensors, and its fake."""

        def run(
            positions: Any, query: Any, key: Any, value: Any, table: Any, layer_name: Any
        ) -> Any:
            return self._run(positions, query, key, value, table, layer_name)

        def fake(
            positions: Any, query: Any, key: Any, value: Any, table: Any, layer_name: Any
        ) -> torch.Tensor:
            return torch.empty(0, device=key.device, dtype=key.dtype)

        return run, fake

    def _run(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        layer_name: Any,
    ) -> torch.Tensor:
        """Rotate query [tokens, q_heads, head_dim] in place and write key and value to the cache.

        The layer, its cache and its slots are those of the forward pass that is running. Attention
        reads the cache, so the key need not be rotated in place; vLLM's own rotation does.
        """
        _, attention, cache, slots = self._context(self._resolve(layer_name))
        positions, table = positions.flatten(), self._tables.rounded(table, query.dtype)
        flat = query.flatten(1), key.flatten(1), value.flatten(1)
        if self.kernel is not None:
            caches = None if slots is None else engine.kv_caches(cache, query.shape[-1])
            reason = "no KV cache yet" if caches is None else refusal(attention)
            if reason is not None or caches is None:
                self.kernel.book.reasons[str(reason)] += 1
            elif self.kernel(positions, *flat, query.new_empty(0), table, slots, *caches):
                return key.new_empty(0)
        self._by_vllm(attention, cache, slots, positions, (query, key, value), table)
        if self.kernel is not None:
            self.kernel.left()
        return key.new_empty(0)

    def _by_vllm(
        self,
        attention: Any,
        cache: Any,
        slots: torch.Tensor | None,
        positions: torch.Tensor,
        parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        table: torch.Tensor,
    ) -> None:
        """vLLM's own rotation in place, and its write, of [tokens, heads, head_dim] each."""
        query, key, value = parts
        size = query.shape[-1]
        self._rotate(positions, query.flatten(1), key.flatten(1), size, table)
        if slots is not None:
            attention.impl.do_kv_cache_update(attention, key, value, cache, slots)


OPERATORS: dict[str, RopeKvOperator] = {}
"""The registered operators by name, as lasting as PyTorch's own table of them."""


def operator_of(kernel: Dispatcher, kind: type[RopeKvOperator] = RopeKvOperator) -> RopeKvOperator:
    """The operator of a patch, with its kernel in."""
    name = f"{kind.prefix}_{kernel.book.digest[:12]}"
    if name not in OPERATORS:
        OPERATORS[name] = kind(name)
    OPERATORS[name].kernel = kernel
    return OPERATORS[name]


@dataclass
class _Rounded:
    source: Any
    """A weak reference to the storage of the table."""
    written: tuple[int, int]
    """Address and version of the source when it was rounded."""
    tensor: torch.Tensor

    @property
    def dead(self) -> bool:
        return bool(self.source.expired())


class RoundedTables:
    """Tables of cosines and sines, rounded to the dtype of a query.

    vLLM rounds them at each use, in compiled code. A rounded table lives as long as the storage of
    its source, and is written again in place when that changes, since recorded graphs read it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Rounded] = {}

    def rounded(self, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The table [positions, head_dim] in another dtype; itself if it has that dtype."""
        if table.dtype == dtype:
            return table
        storage = table.untyped_storage()
        key = storage._cdata, table.storage_offset(), table.shape, table.dtype, dtype
        written = table.data_ptr(), table._version
        known = self._known.get(key)
        if known is None:
            weak: Any = reductions.StorageWeakRef
            self._known = {k: one for k, one in self._known.items() if not one.dead}
            known = _Rounded(weak(storage), written, table.to(dtype))
            self._known[key] = known
        elif known.written != written:
            known.tensor.copy_(table)
            known.written = written
        return known.tensor


def engines_rotation() -> Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None
]:
    """vLLM's own rotation: positions [tokens], query and key [tokens, heads * head_dim], which are
    written in place, head_dim and the table [positions, head_dim]."""
    platform = sources.module("vllm.platforms").current_platform
    kernels = sources.module("vllm._custom_ops")
    in_torch = sources.module(ROTARY).RotaryEmbedding.forward_static

    def by_kernel(positions: Any, query: Any, key: Any, size: int, table: Any) -> None:
        kernels.rotary_embedding(positions, query, key, size, table, True)

    def by_torch(positions: Any, query: Any, key: Any, size: int, table: Any) -> None:
        rotated = in_torch(positions, query, key, size, size, table, True)
        query.copy_(rotated[0])
        key.copy_(rotated[1])

    return by_kernel if platform.is_cuda() else by_torch
