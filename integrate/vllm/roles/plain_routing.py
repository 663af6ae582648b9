"""`FusedTopKRouter`, which has neither groups nor a bias: what two patch points do with its calls.

`router.topk` takes the softmax with renormalised weights, `router.grouped_topk` the other settings,
so that both may be in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patcher.integrate.vllm import sources
from patcher.integrate.vllm.swap import SharedPatch

MODULE = "vllm.model_executor.layers.fused_moe.router.fused_topk_router"
METHOD = "_compute_routing"
Routed = tuple[torch.Tensor, torch.Tensor]
Part = Callable[[Any, torch.Tensor, torch.Tensor, torch.dtype | None], Routed | None]
"""What a point does with a call: weights and experts of a router by the hidden states, its logits
and the dtype of experts; None if it leaves the call."""


def kind() -> Any:
    """The class."""
    return sources.module(MODULE).FusedTopKRouter


def place(point: str) -> SharedPatch:
    """Where a point puts its part."""
    return SharedPatch(kind(), METHOD, point, _sharing)


def is_plain(router: Any) -> bool:
    """Whether a router has the settings that `router.topk` takes."""
    return router.scoring_func == "softmax" and bool(router.renormalize)


def _sharing(original: Any, parts: dict[str, Part]) -> Any:
    def _compute_routing(
        router: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        **more: Any,
    ) -> Routed:
        for part in parts.values():
            found = part(router, hidden_states, router_logits, indices_type)
            if found is not None:
                return found
        theirs: Routed = original(router, hidden_states, router_logits, indices_type, **more)
        return theirs

    return _compute_routing
