"""Rotary embedding and the write to vLLM's paged KV cache, in one call, for any model.

vLLM rotates in compiled code and writes in a separate operator, `vllm::unified_kv_cache_update`.
The patch marks each rotation while Dynamo traces the model. Before vLLM splits the graph, rotations
whose results go straight into the KV write and the attention are replaced, with the write, by one
operator; see `rope_graph`. All others are left as they were, with a reason that is counted. So are
rotations that no graph of vLLM's contains (`enforce_eager`, mode NONE): there the write follows in
another Python call, and nothing says that no one reads the query in between.

If vLLM splits its graphs at the write (piecewise mode), it must also split at this operator, since
Python looks up the slots and does not run during replay. The operator's name is added to those at
which vLLM is about to split. With Inductor's graph partition vLLM records its own write, and so it
does this one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.graph_seam import GraphRewrite
from patcher.integrate.vllm.roles import rope_graph
from patcher.integrate.vllm.roles.graph_reads import value_of
from patcher.integrate.vllm.roles.marked_rotation import (
    ROTATION_PARTS,
    MarkedRotation,
    rotation_of,
    unlike_rotation,
)
from patcher.integrate.vllm.roles.rope_operator import (
    ATTENTION,
    FLASH,
    ROTARY,
    RopeKvOperator,
    operator_of,
    refusal,
)


class RopeKvUpdate(MarkedRotation):
    """Whole NeoX rotations before attention with FlashAttention's own cache."""

    name: ClassVar[str] = "rope_kv"
    op: ClassVar[str] = "rope_kv_update"
    parts: ClassVar[tuple[str, ...]] = (
        *ROTATION_PARTS,
        f"{ATTENTION}:Attention.forward",
        f"{ATTENTION}:get_attention_context",
        f"{ATTENTION}:unified_kv_cache_update",
        f"{ATTENTION}:unified_attention_with_output",
        f"{FLASH}:FlashAttentionImpl.do_kv_cache_update",
        "vllm.compilation.partition_rules:should_split",
        "vllm.utils.torch_utils:direct_register_custom_op",
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._operator: RopeKvOperator | None = None

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        self._operator = operator = operator_of(kernel, self._operator_kind())
        self._put_in(kernel, operator.overload, _rewrite(operator, kernel, self._source_of()))

    def of_role(self, layer: Any) -> bool:
        return rotation_of(layer) is not None and _attention_of(layer) is not None

    def applies(self, layer: Any) -> str | None:
        if not engine.compiles_graphs():
            return "vLLM compiles no graph in which rotation and write could be found"
        kind = sources.module(ROTARY).RotaryEmbedding
        return unlike_rotation(rotation_of(layer), kind) or refusal(_attention_of(layer))

    def remove(self) -> None:
        operator, self._operator = self._operator, None
        if operator is not None:
            operator.kernel = None
        super().remove()

    def _source_of(self) -> rope_graph.SourceOf | None:
        """What else is fused with the rotation, if anything is."""
        return None

    def _operator_kind(self) -> type[RopeKvOperator]:
        return RopeKvOperator


def _attention_of(layer: Any) -> Any:
    """The attention that a module holds itself; None if it has none."""
    kind = sources.module(ATTENTION).Attention
    return next((part for part in layer.children() if isinstance(part, kind)), None)


def _rewrite(
    operator: RopeKvOperator, kernel: Dispatcher, source_of: rope_graph.SourceOf | None
) -> GraphRewrite:
    resolve = sources.module("vllm.utils.torch_utils")._resolve_layer_name

    def refuses(name: Any) -> str | None:
        """The refusal of the layer of that name in the engine whose graph is compiled."""
        context = engine.forward_context()
        if context is None:
            return "compiled outside a forward pass"
        attention = context.no_compile_layers.get(resolve(value_of(name)))
        return "a layer of unknown name" if attention is None else refusal(attention)

    def rewrite(graph: torch.fx.GraphModule, splitting_ops: list[str]) -> list[str]:
        reasons = rope_graph.fuse(graph, operator.overload, refuses, source_of)
        kernel.book.leave_in_graph(reasons)
        there = [operator.name] if rope_graph.WRITE in splitting_ops else []
        return [*splitting_ops, *there]

    return rewrite
