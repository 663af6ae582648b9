"""The start of vLLM's attention block in one call: qkv projection, rotation and KV write.

It is the point `rope_kv` with the linear layer before it: the same marks, the same operator in the
same place, and the same refusals. Query, key and value must be all that the projection makes, with
nothing in between: a model that normalises queries and keys there (Qwen3) keeps its own, and so do
layers with quantised weights or LoRA; all are counted with the reason. Where the point `linear` is
in, its operator is taken over here, and it keeps the other layers.

Both points mark `RotaryEmbedding.forward`, so that one of them is refused while the other is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.roles.linear import Linear, engines_own
from patcher.integrate.vllm.roles.linear_graph import projection_of
from patcher.integrate.vllm.roles.rope_graph import SourceOf
from patcher.integrate.vllm.roles.rope_kv import RopeKvUpdate
from patcher.integrate.vllm.roles.rope_operator import RopeKvOperator, refusal
from patcher.integrate.vllm.swap import AttributePatch

_LINEAR = "vllm.model_executor.layers.linear"


class QkvRopeKv(RopeKvUpdate):
    """Plain projections and whole NeoX rotations before attention with FlashAttention's cache."""

    name: ClassVar[str] = "qkv_rope_kv"
    op: ClassVar[str] = "qkv_rope_kv_update"
    parts: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys((*RopeKvUpdate.parts, *Linear.parts)))

    def find(self) -> str:
        engine.must_allow_another("matmul")
        return super().find()

    def applies(self, layer: Any) -> str | None:
        if (reason := super().applies(layer)) is not None:
            return reason
        base = sources.module(_LINEAR)
        projections = [one for one in layer.children() if isinstance(one, base.QKVParallelLinear)]
        if len(projections) != 1:
            return "no projection to query, key and value at once"
        if any(hasattr(layer, name) for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
            return "norms of query and key between projection and rotation"
        return Linear().applies(projections[0])

    def _source_of(self) -> SourceOf:
        return projection_of

    def _operator_kind(self) -> type[RopeKvOperator]:
        return QkvRopeKvOperator

    def _targets(self) -> list[AttributePatch]:
        # what the operator writes is its graph's own, so that no pass must be told
        return super()._targets()[:1]


class QkvRopeKvOperator(RopeKvOperator):
    """`patcher::qkv_rope_kv_<digest>`; without a kernel, vLLM's matmul, rotation and write."""

    prefix: ClassVar[str] = "qkv_rope_kv"
    mutates: ClassVar[tuple[str, ...]] = ("row",)

    def _functions(self) -> tuple[Any, Callable[..., torch.Tensor]]:
        def run(
            x: Any, weight: Any, bias: Any, positions: Any, row: Any, table: Any, layer_name: Any
        ) -> Any:
            return self._project(x, weight, bias, positions, row, table, layer_name)

        def fake(
            x: Any, weight: Any, bias: Any, positions: Any, row: Any, table: Any, layer_name: Any
        ) -> torch.Tensor:
            return torch.empty(0, device=row.device, dtype=row.dtype)

        return run, fake

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        positions: torch.Tensor,
        row: torch.Tensor,
        table: torch.Tensor,
        layer_name: Any,
    ) -> torch.Tensor:
        """Write the rotated query to the first columns of `row`, and key and value to the cache.

        Attention reads the cache, so that the kernel leaves the row's other columns as they are;
        vLLM's own code writes them, too.
        """
        _, attention, cache, slots = self._context(self._resolve(layer_name))
        positions, table = positions.flatten(), self._tables.rounded(table, row.dtype)
        size, kv = attention.head_size, attention.num_kv_heads * attention.head_size
        cut = row.shape[1] - 2 * kv
        query, key, value = row[:, :cut], row[:, cut : cut + kv], row[:, cut + kv :]
        if self.kernel is not None:
            caches = None if slots is None else engine.kv_caches(cache, size)
            reason = "no KV cache yet" if caches is None else refusal(attention)
            if reason is not None or caches is None:
                self.kernel.book.reasons[str(reason)] += 1
            elif self.kernel(x, weight, bias, positions, table, slots, query, *caches):
                return row.new_empty(0)
        engines_own(x, weight, bias, row)
        q, k, v = (part.view(len(part), -1, size) for part in (query, key, value))
        self._by_vllm(attention, cache, slots, positions, (q, k, v), table)
        return row.new_empty(0)
