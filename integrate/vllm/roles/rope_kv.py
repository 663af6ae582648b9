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

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.graph_seam import BACKENDS, GraphRewrite, graph_rewrite
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import rope_graph
from patcher.integrate.vllm.roles.graph_reads import value_of
from patcher.integrate.vllm.roles.rope_operator import (
    ATTENTION,
    FLASH,
    ROTARY,
    RopeKvOperator,
    operator_of,
    refusal,
)
from patcher.integrate.vllm.swap import AttributePatch

_FIX = "vllm.compilation.passes.utility.fix_functionalization"


class RopeKvUpdate(VllmPoint):
    """Whole NeoX rotations before attention with FlashAttention's own cache."""

    name: ClassVar[str] = "rope_kv"
    op: ClassVar[str] = "rope_kv_update"
    fusions: ClassVar[tuple[str, ...]] = (
        "enable_qk_norm_rope_fusion",
        "fuse_rope_kvcache",
        "fuse_qk_norm_rope_kvcache",
    )
    parts: ClassVar[tuple[str, ...]] = (
        "vllm.model_executor.custom_op:CustomOp.forward",
        f"{ROTARY}:RotaryEmbeddingBase.__init__",
        f"{ROTARY}:RotaryEmbeddingBase._match_cos_sin_cache_dtype",
        f"{ROTARY}:RotaryEmbedding.forward_static",
        f"{ROTARY}:RotaryEmbedding.forward_native",
        f"{ROTARY}:RotaryEmbedding.forward_cuda",
        f"{ATTENTION}:Attention.forward",
        f"{ATTENTION}:get_attention_context",
        f"{ATTENTION}:unified_kv_cache_update",
        f"{ATTENTION}:unified_attention_with_output",
        f"{FLASH}:FlashAttentionImpl.do_kv_cache_update",
        f"{BACKENDS}:split_graph",
        "vllm.compilation.partition_rules:should_split",
        "vllm.utils.torch_utils:direct_register_custom_op",
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._operator: RopeKvOperator | None = None

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        forward, *fixes = self._targets()
        other = getattr(forward.original, "point", self.name)
        if other != self.name:
            raise VerificationError(
                f"{other} is in, and {self.name} would be in its place",
                f"revert the patch of {other} first",
            )
        for swap in (forward, *fixes):
            swap.must_be_the_engines()
        graph_rewrite(self.name).must_have_room()
        return f"{ROTARY}.RotaryEmbedding.forward"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        keep: Any = torch.compiler.allow_in_graph  # as a node, instead of tracing into it
        for mark in rope_graph.MARKS:
            keep(mark)
        self._operator = operator = operator_of(kernel, self._operator_kind())
        forward, *fixes = self._targets()
        graph = graph_rewrite(self.name)
        self._swaps = [forward, *fixes, graph]
        marked = _forward(forward.original, kernel)
        marked.point = self.name
        forward.install(marked)
        graph.install(_rewrite(operator, kernel, self._source_of()))
        for fix in fixes:
            fix.install(_fix(fix.original, operator))
        self.name_lost_fusions()

    def of_role(self, layer: Any) -> bool:
        rotation, attention = _parts_of(layer)
        return rotation is not None and attention is not None

    def applies(self, layer: Any) -> str | None:
        rotation, attention = _parts_of(layer)
        if not engine.compiles_graphs():
            return "vLLM compiles no graph in which rotation and write could be found"
        return _unlike(rotation, sources.module(ROTARY).RotaryEmbedding) or refusal(attention)

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

    def _targets(self) -> list[AttributePatch]:
        return [
            AttributePatch(sources.module(ROTARY).RotaryEmbedding, "forward"),
            AttributePatch(sources.module(_FIX).FixFunctionalizationPass, "__call__"),
        ]


def _parts_of(layer: Any) -> tuple[Any, Any]:
    """The rotation and the attention that a module holds itself; None for what it lacks."""
    kinds = sources.module(ROTARY).RotaryEmbeddingBase, sources.module(ATTENTION).Attention
    found = [[part for part in layer.children() if isinstance(part, kind)] for kind in kinds]
    rotation, attention = ((*parts, None)[0] for parts in found)
    return rotation, attention


def _unlike(rotation: Any, kind: Any) -> str | None:
    """Why a rotation is not that of the contract, as `RotaryEmbedding` does it; None if it is."""
    own = type(rotation)
    if not isinstance(rotation, kind) or own.forward_native is not kind.forward_native:
        return f"a rotation of class {own.__name__}"
    if not rotation.is_neox_style or rotation.use_flashinfer or rotation.use_aiter:
        return "another kind of rotation"
    return None if rotation.rotary_dim == rotation.head_size else "a rotation of a part of the head"


def _forward(original: Any, kernel: Dispatcher) -> Any:
    kind = sources.module(ROTARY).RotaryEmbedding

    def forward(
        layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        if not torch.compiler.is_compiling():
            kernel.book.reasons["outside vLLM's compiled graphs"] += 1
            return original(layer, positions, query, key)
        if key is None:
            return original(layer, positions, rope_graph.left_alone(query, "no key"), key)
        if (reason := _unlike(layer, kind)) is not None:
            return original(layer, positions, rope_graph.left_alone(query, reason), key)
        query, key = rope_graph.enter(query, key)
        rotated_query, rotated_key = original(layer, positions, query, key)
        return rope_graph.leave(rotated_query, rotated_key, positions, layer.cos_sin_cache)

    return forward


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
        kernel.book.reasons.update(reasons)
        there = [operator.name] if rope_graph.WRITE in splitting_ops else []
        return [*splitting_ops, *there]

    return rewrite


def _fix(original: Any, operator: RopeKvOperator) -> Any:
    def __call__(this: Any, graph: torch.fx.Graph) -> None:
        rope_graph.keep_in_place(graph, operator.overload)
        original(this, graph)

    return __call__
