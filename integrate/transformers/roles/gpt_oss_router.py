"""`gpt_oss.router`: top k of the router's logits and their softmax in one call of `moe_topk`.

The matmul before it stays transformers' own. The result is that of `GptOssTopKRouter`: logits,
scores and indices, so that router logits can still be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.parts import check_kinds
from patcher.integrate.transformers.swap import Forward


class GptOssRouters(GptOssPoint):
    """Replaces the `forward` of the router modules."""

    name: ClassVar[str] = "gpt_oss.router"
    op: ClassVar[str] = "moe_topk"
    within: ClassVar[tuple[str, ...]] = "mlp", "router"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source of the router."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        return source_digest(source.GptOssTopKRouter)

    def parts(self, body: Any) -> list[torch.nn.Module]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        routers = [layer.mlp.router for layer in body.layers]
        check_kinds(routers, source.GptOssTopKRouter)
        return routers

    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        for layer in body.layers:
            yield layer.mlp.router, partial(_router_forward, layer.mlp.router, seam)

    @staticmethod
    def original(*args: Any) -> None:
        _top_k(*args)


def _router_forward(router: Any, seam: ForwardPatch, original: Forward) -> Forward:
    def forward(hidden_states: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            seam.refuse("gradients are on")
            return original(hidden_states)
        logits = torch.nn.functional.linear(hidden_states, router.weight, router.bias)
        scores = logits.new_empty(len(logits), router.top_k)
        indices = torch.empty_like(scores, dtype=torch.int64)
        if not seam(logits, scores, indices):
            _top_k(logits, scores, indices)
        return logits, scores, indices

    return forward


def _top_k(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
    """The router's own top k and softmax of its logits."""
    values, chosen = torch.topk(logits, scores.shape[1], dim=-1)
    scores.copy_(torch.softmax(values, dim=1, dtype=values.dtype))
    experts.copy_(chosen)
