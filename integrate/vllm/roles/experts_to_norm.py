"""From a layer's experts to the next norm: expert sum, residual add and norm in one kernel.

In vLLM the sum is the end of an operator that compilers do not decompose, and the norm follows in
the next layer. Both are operators of the graph that Dynamo traced, so pairs are fused there, of any
model, and no forward is replaced: hooks, offloaded weights and readers between layers are in the
graph, too. The experts' operator becomes one that returns their rows and the rows' map. Experts
that do not end in a plain sum return their result as one row per token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import fx

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import engines_add_norm
from patcher.integrate.vllm.graph_seam import BACKENDS, counted_rewrite, graph_rewrite
from patcher.integrate.vllm.roles import experts_graph
from patcher.integrate.vllm.roles.add_norm import NORM_FUSIONS, AddRmsNorm
from patcher.integrate.vllm.roles.experts_graph import FusedOperators
from patcher.integrate.vllm.roles.experts_sum import place_of_sums, summed
from patcher.integrate.vllm.roles.fused_experts import (
    FusedExperts,
    counted,
    place_of_forward,
    top_k_of,
)
from patcher.integrate.vllm.swap import SharedPatch

_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows [tokens * top_k, hidden], and the map to each token's rows, int32 [tokens, top_k]; -1 for
none."""


class ExpertsToNorm(FusedExperts):
    """Every layer's experts, and the norm of the layer after it or of the model."""

    name: ClassVar[str] = "experts_to_norm"
    op: ClassVar[str] = "reduce_add_rms_norm"
    fusions: ClassVar[tuple[str, ...]] = NORM_FUSIONS
    parts: ClassVar[tuple[str, ...]] = (
        f"{BACKENDS}:split_graph",
        f"{_RUNNER}:MoERunner._encode_layer_name",
        f"{_RUNNER}:MoERunner._forward_impl",
        f"{_RUNNER}:_moe_forward",
        f"{_RUNNER}:_moe_forward_fake",
        f"{_RUNNER}:get_layer_from_name",
        f"{_RUNNER}:_resolve_layer_name",
        "vllm.ir.op:IrOpInplaceOverload.__init__",
        "vllm.ir.ops.layernorm:fused_add_rms_norm",
        "vllm._custom_ops:fused_add_rms_norm",
        f"{_MATMUL}:reduce_grouped",
        f"{_MATMUL}:matmul_ogs",
        f"{_MATMUL}:init_allocation",
        f"{_EXPERTS}:triton_kernel_fused_experts",
    )

    def _places(self) -> list[SharedPatch]:
        places = graph_rewrite, place_of_sums, place_of_forward
        return [place(self.name) for place in places]

    def applies(self, layer: Any) -> str | None:
        return "shared experts" if layer._shared_experts is not None else super().applies(layer)

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        unsummed = _Unsummed()
        self._library, experts = _experts_operator(
            f"experts_{kernel.book.digest[:12]}", unsummed.run
        )
        operators = FusedOperators(experts, kernel.op(_two_kernels()), f"patcher::{AddRmsNorm.op}_")

        def fuse(graph: fx.GraphModule) -> list[str]:
            return experts_graph.fuse(graph, operators, lambda *at: top_k_of(self, *at))

        self._put_in(counted_rewrite(kernel, fuse), unsummed.take, counted(kernel))


class _Unsummed:
    """Runs experts so that a plain sum at their end is left out; threads do not meet."""

    def __init__(self) -> None:
        self._asked = threading.local()

    def run(self, layer: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Rows:
        """The experts' rows and map, or their completed sum as one row per token."""
        with self._collected() as found:
            whole = layer._forward_impl(hidden_states, router_logits, None, None)
        return found[0] if found else _one_row_each(whole, layer.moe_config.experts_per_token)

    def take(self, x: Any, row_map: Any, out: Any, more: bool) -> bool:
        """Keep the rows of a plain sum, if `run` asks for them in this thread; see `Sum`."""
        found: list[Rows] | None = getattr(self._asked, "rows", None)
        if found is None or more:
            return False
        if x.shape[:3] != (1, 1, row_map.numel()) or x.dtype != out.dtype:
            return False
        found.append((x[0, 0], row_map))
        return True

    @contextmanager
    def _collected(self) -> Iterator[list[Rows]]:
        found: list[Rows] = []
        self._asked.rows = found
        try:
            yield found
        finally:
            self._asked.rows = None


def _experts_operator(
    name: str, run: Callable[[Any, torch.Tensor, torch.Tensor], Rows]
) -> tuple[Any, Any]:
    """`vllm::moe_forward` without the sum, as an opaque operator.

    Returns:
        The library that owns the operator, and the operator.
    """
    runner = sources.module(_RUNNER)
    library: Any = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]

    def experts(hidden_states, router_logits, top_k, layer_name):  # type: ignore[no-untyped-def]
        layer = runner.get_layer_from_name(runner._resolve_layer_name(layer_name))
        return run(layer, hidden_states, router_logits)

    def fake(hidden_states, router_logits, top_k, layer_name):  # type: ignore[no-untyped-def]
        tokens, hidden = hidden_states.shape
        rows = hidden_states.new_empty((tokens * top_k, hidden))
        return rows, hidden_states.new_empty((tokens, top_k), dtype=torch.int32)

    # set explicitly, since only vLLM can resolve the type of a layer's name
    experts.__annotations__ = {
        "hidden_states": torch.Tensor,
        "router_logits": torch.Tensor,
        "top_k": int,
        "layer_name": runner._layer_name_type,
        "return": Rows,
    }
    sources.module("vllm.utils.torch_utils").direct_register_custom_op(
        name,
        experts,
        # as vLLM declares for its own operator
        mutates_args=["hidden_states"],
        fake_impl=fake,
        target_lib=library,
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    return library, getattr(torch.ops.patcher, name).default


def _one_row_each(whole: torch.Tensor, top_k: int) -> Rows:
    """A completed sum as rows, one per token."""
    tokens, hidden = whole.shape
    rows = whole.new_empty((tokens * top_k, hidden))
    rows[:tokens] = whole
    row_map = torch.full((tokens, top_k), -1, dtype=torch.int32, device=whole.device)
    row_map[:, 0] = torch.arange(tokens, dtype=torch.int32, device=whole.device)
    return rows, row_map


def _two_kernels() -> Callable[..., None]:
    """The fallback of the kernel: vLLM's sum, then its norm."""
    norm = engines_add_norm()

    def run(
        rows: torch.Tensor,
        row_map: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        epsilon: float,
    ) -> None:
        summed(rows[None, None], row_map, output[None])
        norm(output, residual, weight, epsilon)

    return run
