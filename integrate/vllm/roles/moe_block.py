"""A block of vLLM's Triton experts in one call: norm, router, experts and the norm after them.

The four are operators of the graph that Dynamo traced, and become one there, before vLLM splits it,
in any model whose experts stand between such norms. The operator asks the layer for its weights at
each call, so that new ones count.

A call that the kernel does not take (more rows, a layer that changed) runs vLLM's own norm, router,
experts and norm; inside the experts, the points of their parts are in as ever. `add_norm`,
`linear`, `add_norm_route` and `experts_to_norm` keep the other layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import fx

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import engines_add_norm
from patcher.integrate.vllm.graph_seam import WIDEST, counted_rewrite, graph_rewrite
from patcher.integrate.vllm.roles import moe_block_graph
from patcher.integrate.vllm.roles.add_norm import NORM_FUSIONS, AddRmsNorm
from patcher.integrate.vllm.roles.add_norm_route import AddNormRoute
from patcher.integrate.vllm.roles.experts import GateUp, packed, unlike
from patcher.integrate.vllm.roles.experts_graph import MOE_BLOCK
from patcher.integrate.vllm.roles.experts_to_norm import ExpertsToNorm
from patcher.integrate.vllm.roles.fused_experts import (
    FusedExperts,
    counted,
    place_of_forward,
    top_k_of,
)
from patcher.integrate.vllm.roles.linear import engines_own
from patcher.integrate.vllm.swap import SharedPatch

_MOE = "vllm.model_executor.layers.fused_moe"
_RUNNER = f"{_MOE}.runner.moe_runner"
_ROUTER = f"{_MOE}.router.fused_moe_router"
_EXPERTS = f"{_MOE}.experts.gpt_oss_triton_kernels_moe"
_MONOLITHIC = f"{_EXPERTS}:OAITritonMxfp4ExpertsMonolithic"
_NO_DP = f"{_MOE}.prepare_finalize.no_dp_ep:MoEPrepareAndFinalizeNoDPEPMonolithic"
_METHOD = "vllm.model_executor.layers.quantization.mxfp4"

Block = tuple[torch.Tensor, torch.Tensor]
"""The normed residual stream after the experts, and the stream; both [tokens, hidden]."""


class MoeBlock(FusedExperts):
    """Every layer of Triton experts between two norms, with a plain linear layer as its router."""

    name: ClassVar[str] = WIDEST
    op: ClassVar[str] = "moe_block"
    fusions: ClassVar[tuple[str, ...]] = NORM_FUSIONS
    parts: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(
            (
                *AddNormRoute.parts,
                *ExpertsToNorm.parts,
                *GateUp.parts,
                f"{_RUNNER}:MoERunner._apply_quant_method",
                f"{_RUNNER}:MoERunner._maybe_dispatch",
                f"{_RUNNER}:MoERunner._maybe_combine",
                f"{_MOE}.routed_experts:RoutedExperts.forward_monolithic",
                f"{_METHOD}:GptOssMxfp4MoEMethod.apply_monolithic",
                f"{_METHOD}:Mxfp4MoEMethod.apply_monolithic",
                f"{_MOE}.modular_kernel:FusedMoEKernelMonolithicImpl.apply",
                f"{_NO_DP}.prepare",
                f"{_NO_DP}.finalize",
                f"{_MONOLITHIC}.__init__",
                f"{_MONOLITHIC}.apply",
            )
        )
    )

    def _places(self) -> list[SharedPatch]:
        return [place(self.name) for place in (graph_rewrite, place_of_forward)]

    def applies(self, layer: Any) -> str | None:
        if layer._shared_experts is not None:
            return "shared experts"
        return super().applies(layer) or _unlike_layer(layer)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        held, given = layer.routed_experts, layer._quant_method.moe_kernel.fused_experts
        gate_up = packed(held.w13_weight, given.quant_config.w1_precision)
        down = packed(held.w2_weight, given.quant_config.w2_precision)
        return {
            "gate_up_weights": gate_up[0],
            "gate_up_scales": gate_up[1],
            "gate_up_bias": given.quant_config.w1_bias.data,
            "down_weights": down[0],
            "down_scales": down[1],
            "down_bias": given.quant_config.w2_bias.data,
        }

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        name = f"{MOE_BLOCK.partition('::')[2]}{kernel.book.digest[:12]}"
        self._library, operation = _operator(name, _Runs(self, kernel))

        def fuse(graph: fx.GraphModule) -> list[str]:
            norms = f"patcher::{AddRmsNorm.op}_"
            return moe_block_graph.fuse(graph, operation, norms, lambda *at: top_k_of(self, *at))

        self._put_in(counted_rewrite(kernel, fuse), counted(kernel))


def _unlike_layer(layer: Any) -> str | None:
    """Why Triton experts are not those of the contract; None if they are."""
    config, experts = layer.moe_config, layer._quant_method.moe_kernel.fused_experts
    if layer.gate is not None:
        return "experts that hold their router"
    if config.dp_size > 1 or config.pcp_size > 1 or config.is_sequence_parallel:
        return "tokens shared by several ranks"
    # from 0.33.0 on, a router may make logits up
    base, prepare = sources.module(_ROUTER).FusedMoERouter, "prepare_monolithic_logits"
    own = getattr(base, prepare, None)
    if getattr(type(layer.router), prepare, own) is not own:
        return "a router that replaces logits"
    held, given = layer.routed_experts, experts.quant_config
    if not experts.renormalize or held.apply_router_weight_on_input:
        return "another kind of routing"
    if given.w1_bias is None or given.w2_bias is None:
        return "experts without biases"
    plain = sources.module("triton_kernels.matmul_ogs").PrecisionConfig()
    return unlike(held.w13_weight, given.w1_precision, plain) or unlike(
        held.w2_weight, given.w2_precision, plain
    )


class _Runs:
    """Runs blocks by the kernel, or by vLLM's own four steps."""

    def __init__(self, point: MoeBlock, kernel: Dispatcher) -> None:
        self._point, self._kernel = point, kernel
        self._norm = engines_add_norm()
        # vLLM's experts leave them at their defaults
        known = inspect.signature(
            sources.part(f"{_EXPERTS}:triton_kernel_fused_experts")
        ).parameters
        self._activation = known["swiglu_alpha"].default, known["swiglu_limit"].default

    def run(
        self,
        layer: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        router_weight: torch.Tensor,
        router_bias: torch.Tensor,
        next_weight: torch.Tensor,
        logits: torch.Tensor,
        epsilon: float,
    ) -> Block:
        """The block of a layer; x and logits may be written."""
        router = weight, router_weight, router_bias
        made = self._by_kernel(layer, (x, residual, *router), next_weight, logits, epsilon)
        if made is not None:
            return made
        total = residual.clone()
        self._norm(x, total, weight, epsilon)
        engines_own(x, router_weight, router_bias, logits)
        output = layer._forward_impl(x, logits, None, None)
        self._norm(output, total, next_weight, epsilon)
        return output, total

    def _by_kernel(
        self,
        layer: Any,
        given: tuple[torch.Tensor, ...],
        next_weight: torch.Tensor,
        logits: torch.Tensor,
        epsilon: float,
    ) -> Block | None:
        """What the kernel gives; None if it does not take the call."""
        reason = self._point.applies(layer)
        if reason is not None:
            self._kernel.book.reasons[reason] += 1
            return None
        x, top_k = given[0], layer.moe_config.experts_per_token
        chosen = x.new_empty((len(x), top_k), dtype=torch.int32)
        total, output = x.new_empty(x.shape), x.new_empty(x.shape)
        experts = self._point.constants(layer).values()
        written = logits, chosen, total, output
        ran = self._kernel(*given, *experts, next_weight, *written, *self._activation, epsilon)
        return (output, total) if ran else None


def _operator(name: str, runs: _Runs) -> tuple[Any, Any]:
    """The block as an opaque operator; see `moe_block_graph.fuse`.

    Returns:
        The library that owns the operator, and the operator.
    """
    runner = sources.module(_RUNNER)
    library: Any = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]

    def block(  # type: ignore[no-untyped-def]
        x, residual, weight, router_weight, router_bias, next_weight, logits, epsilon, layer_name
    ):
        layer = runner.get_layer_from_name(runner._resolve_layer_name(layer_name))
        router = weight, router_weight, router_bias
        return runs.run(layer, x, residual, *router, next_weight, logits, epsilon)

    def fake(x, *rest):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape), x.new_empty(x.shape)

    # set explicitly, since only vLLM can resolve the type of a layer's name
    given = ("x", "residual", "weight", "router_weight", "router_bias", "next_weight", "logits")
    block.__annotations__ = {
        **dict.fromkeys(given, torch.Tensor),
        "epsilon": float,
        "layer_name": runner._layer_name_type,
        "return": Block,
    }
    sources.module("vllm.utils.torch_utils").direct_register_custom_op(
        name,
        block,
        # vLLM's norm and matmul write them
        mutates_args=["x", "logits"],
        fake_impl=fake,
        target_lib=library,
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    return library, getattr(torch.ops.patcher, name).default
