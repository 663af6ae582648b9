"""The router of a mixture of experts: `FusedTopKRouter`, with softmax and renormalised weights.

It runs inside the operator `vllm::moe_forward`, which compilers do not decompose, so a plain method
is replaced. Grouped, biased and sigmoid routers are other classes or other settings, and experts
that route by themselves (monolithic ones) never call it.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakSet

import torch

from patcher.bench import load_op
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import plain_routing

_ROUTER = plain_routing.MODULE
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_TOLERANCE = 1e-3
"""Of a routing weight: the engine's kernel divides by a sum, and the op's reference does not."""


class TopKRouter(VllmPoint):
    """Routers of experts that are told where each token goes."""

    name: ClassVar[str] = "router.topk"
    op: ClassVar[str] = "moe_topk"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_ROUTER}:FusedTopKRouter.__init__",
        f"{_ROUTER}:FusedTopKRouter._compute_routing",
        f"{_ROUTER}:fused_topk",
        f"{_ROUTER}:vllm_topk_softmax",
        f"{_ROUTER}:_get_padding_mask",
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._left: WeakSet[Any] = WeakSet()
        """Routers that failed their trial."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        plain_routing.place(self.name).must_have_room()
        engine.must_allow_another("router")
        return f"{_ROUTER}.FusedTopKRouter._compute_routing"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_RUNNER).MoERunner)

    def applies(self, layer: Any) -> str | None:
        if layer.is_monolithic:
            return "experts that route by themselves"
        router = layer.router
        if type(router) is not plain_routing.kind():
            return f"routing by {type(router).__name__}"
        reason = _unlike(router)
        if reason is None and not self._computes(router, next(layer.parameters()).device):
            self._left.add(router)
            reason = "it computes something else"
        return reason

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = plain_routing.place(self.name)
        mask_of = getattr(sources.module(_ROUTER), "_get_padding_mask", None)
        place.install(_part(kernel, self._left, mask_of))
        self._swaps = [place]

    @torch.no_grad()
    def _computes(self, router: Any, device: torch.device) -> bool:
        """Whether a router chooses and weighs as the op does, for a few tokens."""
        routing = type(router)._compute_routing
        routing = getattr(routing, "__wrapped__", routing)
        rows = torch.arange(4.0, device=device).unsqueeze(1) + 1
        columns = torch.arange(router.global_num_experts, device=device)
        logits = 3 * torch.sin(rows * (columns + 1) * 1.7)
        weights, ids = routing(router, logits, logits, None)
        found = load_op(self.op).reference(logits=logits, scores=weights, experts=ids)
        return torch.equal(ids.double(), found["experts"]) and torch.allclose(
            weights.double(), found["scores"], rtol=_TOLERANCE, atol=_TOLERANCE
        )


def _unlike(router: Any) -> str | None:
    """Why a router's settings are not those of the op; None if they are."""
    if router.scoring_func != "softmax":
        return f"scores by {router.scoring_func}"
    return None if router.renormalize else "weights that are not renormalised"


def _part(kernel: Dispatcher, left: WeakSet[Any], mask_of: Any) -> plain_routing.Part:
    def routed(
        router: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
    ) -> plain_routing.Routed | None:
        if router in left or not plain_routing.is_plain(router):
            return None
        shape, device = (len(router_logits), router.top_k), router_logits.device
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids = torch.empty(shape, dtype=indices_type or torch.int32, device=device)
        if not kernel(router_logits, weights, ids):
            return None
        padding = None if mask_of is None else mask_of(len(ids))
        if padding is not None:  # as the engine's kernel does, so that experts skip them
            ids.masked_fill_(padding.unsqueeze(1), -1)
        return weights, ids

    return routed
