"""Routers that choose by groups or with a bias, `GroupedTopKRouter` and `FusedTopKBiasRouter`, and
those of `FusedTopKRouter` that `router.topk` leaves: by sigmoid or without renormalised weights.

As with `router.topk`, plain methods are replaced. What follows a choice is the engine's: the
capture of routed experts and EPLB's map to physical ones.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from patcher.bench import load_op
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import plain_routing
from patcher.integrate.vllm.swap import AttributePatch

_ROUTERS = "vllm.model_executor.layers.fused_moe.router"
_GROUPED = f"{_ROUTERS}.grouped_topk_router"
_BIASED = f"{_ROUTERS}.fused_topk_bias_router"
_PLAIN = plain_routing.MODULE
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_SCORES = ("sigmoid", "softmax")
_TOLERANCE = 1e-3
"""Of a routing weight: a kernel of the engine may compute a sigmoid by a hyperbolic tangent."""


class GroupedTopKRouter(VllmPoint):
    """Routers of experts that are told where each token goes."""

    name: ClassVar[str] = "router.grouped_topk"
    op: ClassVar[str] = "grouped_topk"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_GROUPED}:GroupedTopKRouter.__init__",
        f"{_GROUPED}:GroupedTopKRouter._compute_routing",
        f"{_GROUPED}:grouped_topk",
        f"{_GROUPED}:fused_grouped_topk",
        f"{_BIASED}:FusedTopKBiasRouter.__init__",
        f"{_BIASED}:FusedTopKBiasRouter._compute_routing",
        f"{_BIASED}:fused_topk_bias",
        f"{_BIASED}:vllm_topk_softmax",
        f"{_BIASED}:vllm_topk_sigmoid",
        f"{_BIASED}:_get_padding_mask",
        f"{_PLAIN}:FusedTopKRouter.__init__",
        f"{_PLAIN}:FusedTopKRouter._compute_routing",
        f"{_PLAIN}:fused_topk",
        f"{_PLAIN}:vllm_topk_softmax",
        f"{_PLAIN}:vllm_topk_sigmoid",
        f"{_PLAIN}:_get_padding_mask",
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._left: WeakSet[Any] = WeakSet()
        """Routers that failed their trial."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        places = self._places()
        for place in places:
            place.must_be_the_engines()
        plain_routing.place(self.name).must_have_room()
        engine.must_allow_another("router")
        names = [f"{place.owner.__module__}.{place.label}" for place in places]
        return " and ".join([*names, f"{_PLAIN}.FusedTopKRouter.{plain_routing.METHOD}"])

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_RUNNER).MoERunner)

    def applies(self, layer: Any) -> str | None:
        if layer.is_monolithic:
            return "experts that route by themselves"
        router = layer.router
        kinds = (*(place.owner for place in self._places()), plain_routing.kind())
        if all(type(router) is not kind for kind in kinds):
            return f"routing by {type(router).__name__}"
        bias = _bias(router)
        # with EPLB there are more experts than logits
        experts = router.global_num_experts if bias is None else bias.numel()
        reason = _unlike(router) or _unfit(router, experts)
        if reason is None and not self._computes(router, experts, next(layer.parameters()).device):
            self._left.add(router)
            reason = "it computes something else"
        return reason

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        grouped, biased = self._places()
        for place in (grouped, biased):
            skips = place is biased  # the other says whether it does, since 0.33.0
            part = _part(place.owner, kernel, self._left, _BIASED, skips)
            place.install(_replacement(place.original, part))
            self._swaps.append(place)
        plain = plain_routing.place(self.name)
        plain.install(_part(plain_routing.kind(), kernel, self._left, _PLAIN, True))
        self._swaps.append(plain)

    @staticmethod
    def _places() -> tuple[AttributePatch, AttributePatch]:
        grouped = sources.module(_GROUPED).GroupedTopKRouter
        biased = sources.module(_BIASED).FusedTopKBiasRouter
        name = "_compute_routing"
        return AttributePatch(grouped, name), AttributePatch(biased, name)

    @torch.no_grad()
    def _computes(self, router: Any, experts: int, device: torch.device) -> bool:
        """Whether a router chooses and weighs as the op does, with its bias, in any order."""
        routing = type(router)._compute_routing
        routing = getattr(routing, "__wrapped__", routing)
        rows = torch.arange(4.0, device=device).unsqueeze(1) + 1
        logits = 3 * torch.sin(rows * (torch.arange(experts, device=device) + 1) * 1.7)
        weights, ids = routing(router, logits, logits, None)
        scaling = _scaling(router)
        none, settings = _constants(router, device)
        bias = _bias(router)
        found = load_op(self.op).reference(
            logits=logits,
            bias=none if bias is None else bias,
            settings=settings,
            experts=ids,
            scaling=scaling,
        )
        ids, order = ids.long().sort(1)
        right, theirs = found["experts"].long().sort(1)
        return torch.equal(ids, right) and torch.allclose(
            weights.double().gather(1, order),
            found["weights"].gather(1, theirs),
            rtol=_TOLERANCE,
            atol=_TOLERANCE * abs(scaling) / ids.shape[1],
        )


def _unlike(router: Any) -> str | None:
    """Why a router's settings are not those of the op; None if they are."""
    if router.scoring_func not in _SCORES:
        return f"scores by {router.scoring_func}"
    if type(router) is plain_routing.kind() and plain_routing.is_plain(router):
        return "the routing of router.topk"
    if getattr(router, "num_fused_shared_experts", 0):
        return "shared experts among those of the router"
    if getattr(router, "_hash_indices_table", None) is not None:
        return "experts by the token's id"
    if getattr(router, "bias_vl", None) is not None:
        return "another bias for images"
    return None


def _bias(router: Any) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(router, "e_score_correction_bias", None)
    return bias


def _scaling(router: Any) -> float:
    """The factor of all weights; plain routers have none."""
    return float(getattr(router, "routed_scaling_factor", 1.0))


def _groups(router: Any) -> tuple[int, int]:
    """The number of groups, and how many of them are kept."""
    return getattr(router, "num_expert_group", 1), getattr(router, "topk_group", 1)


def _unfit(router: Any, experts: int) -> str | None:
    """Why so many experts make no groups, without which the engine routes then; None if they do."""
    groups, top_groups = _groups(router)
    if experts <= groups or experts % groups:
        return "experts that make no groups"
    if top_groups > groups or router.top_k > top_groups * (experts // groups):
        return "groups with fewer experts than it chooses"
    return None


def _constants(router: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias of a router without one, and the tensor whose sizes say how the op routes."""
    sizes = router.scoring_func == "sigmoid", bool(router.renormalize), *_groups(router)
    settings = torch.zeros(*map(int, sizes), dtype=torch.int32, device=device)
    return torch.empty(0, dtype=torch.float32, device=device), settings


def _part(
    kind: type[Any], kernel: Dispatcher, left: WeakSet[Any], module: str, skips: bool
) -> plain_routing.Part:
    mask_of = getattr(sources.module(module), "_get_padding_mask", None)
    known: WeakKeyDictionary[Any, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()

    def chosen(router: Any, logits: torch.Tensor) -> plain_routing.Routed | None:
        if reason := _unfit(router, logits.shape[-1]):
            kernel.book.reasons[reason] += 1
            return None
        if (constants := known.get(router)) is None:
            constants = known[router] = _constants(router, logits.device)
        none, settings = constants
        own = _bias(router)  # another may have been loaded
        bias = none if own is None else own
        shape, device = (len(logits), router.top_k), logits.device
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        taken = kernel(logits, bias, settings, weights, ids, _scaling(router))
        return (weights, ids) if taken else None

    def routed(
        router: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
    ) -> plain_routing.Routed | None:
        if type(router) is not kind or router in left or _unlike(router) is not None:
            return None
        if (found := chosen(router, router_logits)) is None:
            return None
        masks = mask_of if getattr(router, "skip_padding", skips) else None
        padding = masks(len(router_logits)) if masks else None
        if padding is not None:  # as the engine does, so that experts skip them
            found[0].masked_fill_(padding.unsqueeze(1), 0.0)
            found[1].masked_fill_(padding.unsqueeze(1), -1)
        return found[0], found[1].to(indices_type or torch.int32)

    return routed


def _replacement(original: Any, part: plain_routing.Part) -> Any:
    def _compute_routing(
        router: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        **more: Any,
    ) -> plain_routing.Routed:
        found = part(router, hidden_states, router_logits, indices_type)
        if found is not None:
            return found
        theirs: plain_routing.Routed = original(
            router, hidden_states, router_logits, indices_type, **more
        )
        return theirs

    return _compute_routing
