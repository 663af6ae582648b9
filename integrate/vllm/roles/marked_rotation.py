"""What the points that replace rotations have in common: marks, and a rewrite of the graph.

They mark `RotaryEmbedding.forward` while Dynamo traces the model; see `rope_graph`. One attribute
holds the marks of one point, so that of these points one is refused while another is in. Rotations
that no graph of vLLM's contains (`enforce_eager`, mode NONE) are left to vLLM and counted.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.graph_seam import BACKENDS, GraphRewrite, graph_rewrite
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import rope_graph
from patcher.integrate.vllm.roles.rope_operator import ROTARY
from patcher.integrate.vllm.swap import AttributePatch

_FIX = "vllm.compilation.passes.utility.fix_functionalization"
ROTATION_PARTS = (
    "vllm.model_executor.custom_op:CustomOp.forward",
    f"{ROTARY}:RotaryEmbeddingBase.__init__",
    f"{ROTARY}:RotaryEmbeddingBase._match_cos_sin_cache_dtype",
    f"{ROTARY}:RotaryEmbedding.forward_static",
    f"{ROTARY}:RotaryEmbedding.forward_native",
    f"{ROTARY}:RotaryEmbedding.forward_cuda",
    f"{BACKENDS}:split_graph",
)


class MarkedRotation(VllmPoint):
    """A point at whole NeoX rotations of query and key."""

    fusions: ClassVar[tuple[str, ...]] = (
        "enable_qk_norm_rope_fusion",
        "fuse_rope_kvcache",
        "fuse_qk_norm_rope_kvcache",
    )

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

    def _put_in(self, kernel: Dispatcher, operation: Any, rewrite: GraphRewrite) -> None:
        """Install the marks and the rewrite; `operation` is the operator that it puts in."""
        keep: Any = torch.compiler.allow_in_graph  # as a node, instead of tracing into it
        for mark in rope_graph.MARKS:
            keep(mark)
        forward, *fixes = self._targets()
        graph = graph_rewrite(self.name)
        self._swaps = [forward, *fixes, graph]
        marked = _forward(forward.original, kernel)
        marked.point = self.name
        forward.install(marked)
        graph.install(rewrite)
        for fix in fixes:
            fix.install(_fix(fix.original, operation))
        self.name_lost_fusions()

    def _targets(self) -> list[AttributePatch]:
        return [
            AttributePatch(sources.module(ROTARY).RotaryEmbedding, "forward"),
            AttributePatch(sources.module(_FIX).FixFunctionalizationPass, "__call__"),
        ]


def rotation_of(layer: Any) -> Any:
    """The rotation that a module holds itself; None if it has none."""
    kind = sources.module(ROTARY).RotaryEmbeddingBase
    return next((part for part in layer.children() if isinstance(part, kind)), None)


def unlike_rotation(rotation: Any, kind: Any) -> str | None:
    """Why a rotation is not that of the contract, as `RotaryEmbedding`, the kind,
    does it; None if it is."""
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
        if (reason := unlike_rotation(layer, kind)) is not None:
            return original(layer, positions, rope_graph.left_alone(query, reason), key)
        query, key = rope_graph.enter(query, key)
        rotated_query, rotated_key = original(layer, positions, query, key)
        return rope_graph.leave(rotated_query, rotated_key, positions, layer.cos_sin_cache)

    return forward


def _fix(original: Any, operation: Any) -> Any:
    def __call__(this: Any, graph: torch.fx.Graph) -> None:
        rope_graph.keep_in_place(graph, operation)
        original(this, graph)

    return __call__
