"""The start of a block of vLLM's Triton experts: residual add, norm, router and routing in one.

Norm and router are operators of the graph that Dynamo traced, and are fused there, before vLLM
splits it, in any model whose experts are given just these. The routing is a function that the
experts call later, inside an operator that compilers do not decompose. What the kernel routed is
kept until then, and given to the call that has the kernel's own logits; no other call takes it.

A call that the kernel does not take runs vLLM's own norm and matmul, and the experts route, by the
point `router.oai` where it is in. Where `add_norm` or `linear` are in, their operators are taken
over here, and they keep the other layers.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import fx

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm.engine import engines_add_norm
from patcher.integrate.vllm.graph_seam import BACKENDS, counted_rewrite, graph_rewrite
from patcher.integrate.vllm.roles import route_graph
from patcher.integrate.vllm.roles.add_norm import NORM_FUSIONS, AddRmsNorm
from patcher.integrate.vllm.roles.fused_experts import (
    FusedExperts,
    counted,
    place_of_forward,
    top_k_of,
)
from patcher.integrate.vllm.roles.linear import Linear, engines_own
from patcher.integrate.vllm.roles.router import (
    Routing,
    Tables,
    new_tables,
    place_of_routing,
    routed,
)
from patcher.integrate.vllm.swap import SharedPatch

_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"


class AddNormRoute(FusedExperts):
    """Every layer of Triton experts whose router is a plain linear layer of the norm before it."""

    name: ClassVar[str] = "add_norm_route"
    op: ClassVar[str] = "add_rms_norm_route"
    fusions: ClassVar[tuple[str, ...]] = NORM_FUSIONS
    parts: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(
            (
                f"{BACKENDS}:split_graph",
                f"{_RUNNER}:MoERunner._encode_layer_name",
                f"{_RUNNER}:_moe_forward",
                f"{_RUNNER}:_resolve_layer_name",
                "vllm.ir.op:IrOpInplaceOverload.__init__",
                "vllm.ir.ops.layernorm:fused_add_rms_norm",
                "vllm._custom_ops:fused_add_rms_norm",
                *Linear.parts,
                *Routing.parts,
            )
        )
    )

    def _places(self) -> list[SharedPatch]:
        places = graph_rewrite, place_of_routing, place_of_forward
        return [place(self.name) for place in places]

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        kept = _Routed(kernel)
        self._library, operation = _operator(f"add_norm_route_{kernel.book.digest[:12]}", kept)

        def fuse(graph: fx.GraphModule) -> list[str]:
            prefix = f"patcher::{AddRmsNorm.op}_"
            return route_graph.fuse(graph, operation, prefix, lambda *at: top_k_of(self, *at))

        self._put_in(counted_rewrite(kernel, fuse), kept.take, counted(kernel))


class _Routed:
    """What the kernel routed and no experts have taken yet; threads do not meet."""

    def __init__(self, kernel: Dispatcher) -> None:
        self._kernel = kernel
        self._norm = engines_add_norm()
        self._last = threading.local()

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        router_weight: torch.Tensor,
        router_bias: torch.Tensor,
        logits: torch.Tensor,
        top_k: int,
        epsilon: float,
    ) -> None:
        """Run the kernel and keep its tables, or run vLLM's norm and matmul."""
        self._last.found = None
        tables = new_tables(logits, top_k)
        given = x, residual, weight, router_weight, router_bias, logits
        if self._kernel(*given, *tables, epsilon):
            # the logits are held, so that no other tensor can have their place meanwhile
            self._last.found = logits, tables
            return
        self._norm(x, residual, weight, epsilon)
        engines_own(x, router_weight, router_bias, logits)

    def take(self, logits: Any, top_k: int, plain: bool) -> Any:
        """What was routed by these logits; see `RoutingPart`."""
        found: tuple[torch.Tensor, Tables] | None = getattr(self._last, "found", None)
        self._last.found = None
        if found is None:
            return None
        ours, tables = found
        same = plain and (logits.data_ptr(), logits.shape) == (ours.data_ptr(), ours.shape)
        if not same or logits.dtype != ours.dtype or len(tables[1]) != len(ours) * top_k:
            self._kernel.book.reasons["experts that route otherwise"] += 1
            return None
        return routed(tables, ours.shape[1], top_k)


def _operator(name: str, kept: _Routed) -> tuple[Any, Any]:
    """Norm, router and routing as an opaque operator.

    Returns:
        The library that owns the operator, and the operator.
    """
    library: Any = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        f"{name}(Tensor(a0!) x, Tensor(a1!) residual, Tensor weight, Tensor router_weight, "
        "Tensor router_bias, Tensor(a5!) logits, int top_k, float epsilon) -> ()",
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    library.impl(name, kept.run, "CompositeExplicitAutograd")
    library.impl(name, lambda *args: None, "Meta")
    return library, getattr(torch.ops.patcher, name).default
