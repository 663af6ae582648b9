"""Norms of the heads of query and key, and their rotation, in one call, for any model.

vLLM traces both norms as its own operator and the rotation as it is; see `qk_norm_rope_graph`. The
rewrite is of the graph before vLLM splits it, so it is in before the pass that would fuse the same
chain (`enable_qk_norm_rope_fusion`), which then finds nothing, and a warning says so.

The points of rotations exclude each other: `rope_kv` and `qkv_rope_kv` would rotate in their own
call what is rotated here. KV write and attention stay vLLM's, or those of other points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.graph_seam import counted_rewrite
from patcher.integrate.vllm.roles import qk_norm_rope_graph
from patcher.integrate.vllm.roles.add_norm import LAYERNORM, unlike_norm
from patcher.integrate.vllm.roles.marked_rotation import (
    ROTATION_PARTS,
    MarkedRotation,
    rotation_of,
    unlike_rotation,
)
from patcher.integrate.vllm.roles.norm import RmsNorm
from patcher.integrate.vllm.roles.rope_operator import ROTARY, engines_rotation

NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
)
"""How vLLM's models name the norms of query and key."""


class QkNormRope(MarkedRotation):
    """Plain norms of heads before a whole NeoX rotation, whatever follows."""

    name: ClassVar[str] = "qk_norm_rope"
    op: ClassVar[str] = "qk_norm_rope"
    parts: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys((*ROTATION_PARTS, *RmsNorm.parts)))

    def find(self) -> str:
        engine.must_allow_another("norm")
        return super().find()

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        operation = kernel.op(_engines_own())
        rewrite = counted_rewrite(kernel, lambda it: qk_norm_rope_graph.fuse(it, operation))
        self._put_in(kernel, operation, rewrite)

    def of_role(self, layer: Any) -> bool:
        return rotation_of(layer) is not None and _norms_of(layer) is not None

    def applies(self, layer: Any) -> str | None:
        if not engine.compiles_graphs():
            return "vLLM compiles no graph in which norms and rotation could be found"
        rotation, norms = rotation_of(layer), _norms_of(layer) or ()
        if reason := unlike_rotation(rotation, sources.module(ROTARY).RotaryEmbedding):
            return reason
        kind = sources.module(LAYERNORM).RMSNorm
        for norm in norms:
            if reason := unlike_norm(norm, kind):
                return reason
            if norm.weight.shape != (rotation.head_size,):
                return "a norm of something else than heads"
        if len({norm.variance_epsilon for norm in norms}) > 1:
            return "norms of query and key with an epsilon each"
        return None

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        norms = dict(zip(("q_weight", "k_weight"), _norms_of(layer) or (), strict=False))
        return {name: norm.weight.data for name, norm in norms.items()}


def _norms_of(layer: Any) -> tuple[Any, Any] | None:
    """The norms of query and key that a module holds itself; None if it has none."""
    held = dict(layer.named_children())
    return next(((held[q], held[k]) for q, k in NORMS if q in held and k in held), None)


def _engines_own() -> Callable[..., None]:
    """vLLM's own norm and rotation, with the arguments of the contract."""
    norm, rotate = engine.engines_norm(), engines_rotation()

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cos_sin: torch.Tensor,
        epsilon: float,
    ) -> None:
        size = len(q_weight)
        for rows, weight in ((query, q_weight), (key, k_weight)):
            heads = rows.reshape(-1, size)
            normed = torch.empty_like(heads)
            norm(heads, weight, normed, epsilon)
            rows.copy_(normed.view(rows.shape))
        # each token has a row of its own in what was gathered of the table
        rotate(torch.arange(len(query), device=query.device), query, key, size, cos_sin)

    return run
