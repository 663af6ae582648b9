"""gpt-oss from a layer's experts to the next norm: expert sum, residual add and norm in one kernel.

In vLLM the sum is the end of an operator that compilers do not decompose, and the norm follows in
the next layer. So `GptOssModel.forward` is replaced by one with the same layers in the same order.
It calls experts through an operator that returns their rows and the rows' map instead of the sum.
Experts that do not end in a plain sum return their result as one row per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import engines_add_norm
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles import add_norm
from patcher.integrate.vllm.roles.experts_sum import does_more, summed
from patcher.integrate.vllm.roles.triton_experts import TRITON
from patcher.integrate.vllm.swap import AttributePatch

_MODEL = "vllm.model_executor.models.gpt_oss"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_ROUTER = "vllm.model_executor.layers.fused_moe.router.zero_expert_router"
_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows [tokens * top_k, hidden], and the map to each token's rows, int32 [tokens, top_k]; -1 for
none."""


class ExpertsToNorm(VllmPoint):
    """Every layer's experts, and the norm of the layer after it or of the model."""

    name: ClassVar[str] = "experts_to_norm"
    op: ClassVar[str] = "reduce_add_rms_norm"
    wants: ClassVar[Mapping[str, str]] = TRITON
    layers: ClassVar[tuple[str, ...]] = ("GptOssModel",)
    weights: ClassVar[str | None] = "mxfp4"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_MODEL}:GptOssModel.forward",
        f"{_MODEL}:TransformerBlock.forward",
        f"{_MODEL}:MLPBlock.forward",
        f"{_RUNNER}:MoERunner.forward",
        f"{_RUNNER}:MoERunner._forward_impl",
        f"{_RUNNER}:MoERunner._maybe_pad_hidden_states",
        f"{_RUNNER}:MoERunner._maybe_reduce_final_output",
        f"{_RUNNER}:_moe_forward",
        f"{_RUNNER}:get_layer_from_name",
        *add_norm.AddRmsNorm.parts,
        f"{_MATMUL}:reduce_grouped",
        f"{_MATMUL}:matmul_ogs",
        f"{_MATMUL}:init_allocation",
        f"{_EXPERTS}:triton_kernel_fused_experts",
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._library: Any = None
        """The library that owns the experts' operator."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        AttributePatch(sources.module(_MODEL).GptOssModel, "forward").must_be_the_engines()
        return f"{_MODEL}.GptOssModel.forward"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        swap = AttributePatch(sources.module(_MODEL).GptOssModel, "forward")
        operator = kernel.op(_two_kernels())
        self._library, experts = _experts_operator(f"experts_{kernel.book.digest[:12]}")
        swap.install(_forward(swap.original, experts, operator))
        self._swaps = [swap]

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_MODEL).GptOssModel)

    def applies(self, layer: Any) -> str | None:
        engine, zero = sources.module(_MODEL), sources.module(_ROUTER).ZeroExpertRouter
        return None if _plain(layer, engine, zero) else "layers that do more than gpt-oss's own"

    def remove(self) -> None:
        super().remove()
        library, self._library = self._library, None
        if library is not None:
            library._destroy()


def _forward(original: Any, experts: Any, operator: Callable[..., None]) -> Any:
    """The replacement of `GptOssModel.forward`."""
    engine, zero = sources.module(_MODEL), sources.module(_ROUTER).ZeroExpertRouter

    def normed(rows: Rows, residual: torch.Tensor, layer: Any) -> torch.Tensor:
        output = torch.empty_like(residual)
        operator(*rows, residual, layer.weight.data, output, layer.variance_epsilon)
        return output

    # vLLM's wrapper of compiled code requires this name
    def forward(
        self: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        if not _plain(self, engine, zero):
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual: torch.Tensor = hidden
        rows: Rows | None = None
        for layer in self.layers[self.start_layer : self.end_layer]:
            if rows is None:
                hidden = layer.input_layernorm(hidden)
            else:
                hidden = normed(rows, residual, layer.input_layernorm)
            hidden = layer.attn(hidden, positions)
            hidden, residual = layer.post_attention_layernorm(hidden, residual)
            runner = layer.mlp.experts
            rows = experts(
                hidden,
                layer.mlp.router(hidden),
                runner.moe_config.experts_per_token,
                runner._encode_layer_name(),
            )
        assert rows is not None
        return normed(rows, residual, self.norm)

    return forward


def _plain(model: Any, engine: Any, zero: type) -> bool:
    """Whether every layer is attention, experts and two norms on one GPU, and nothing else reads
    the tensors between layers. Compilers trace this function, too.

    Args:
        model: the model's body.
        engine: the module of vLLM's model.
        zero: the class of the router whose experts add a further term.
    """
    group = engine.get_pp_group()
    if not (group.is_first_rank and group.is_last_rank) or model.aux_hidden_state_layers:
        return False
    layers = model.layers[model.start_layer : model.end_layer]
    norms = [*(layer.input_layernorm for layer in layers), model.norm]
    if not layers or not all(add_norm.is_plain(each, engine.RMSNorm) for each in norms):
        return False
    for layer in layers:
        if type(layer) is not engine.TransformerBlock or type(layer.mlp) is not engine.MLPBlock:
            return False
        runner, config = layer.mlp.experts, layer.mlp.experts.moe_config
        more = (
            runner._shared_experts,
            runner.gate,
            runner.routed_input_transform,
            runner.routed_output_transform,
        )
        if any(item is not None for item in more) or isinstance(runner.router, zero):
            return False
        sizes = config.tp_size, config.ep_size, config.dp_size, config.pcp_size
        if sizes != (1, 1, 1, 1) or layer.mlp.is_sequence_parallel:
            return False
        if runner.routed_scaling_factor != 1.0 or config.hidden_dim != layer.mlp.hidden_size:
            return False
    return not engine.current_platform.is_rocm()


def _experts_operator(name: str) -> tuple[Any, Any]:
    """`vllm::moe_forward` without the sum, as an opaque operator.

    Returns:
        The library that owns the operator, and the operator.
    """
    runner = sources.module(_RUNNER)
    library: Any = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]

    def experts(hidden_states, router_logits, top_k, layer_name):  # type: ignore[no-untyped-def]
        layer = runner.get_layer_from_name(runner._resolve_layer_name(layer_name))
        with _unsummed() as unsummed:
            whole = layer._forward_impl(hidden_states, router_logits, None, None)
        return unsummed[0] if unsummed else _one_row_each(whole, top_k)

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
    return library, getattr(torch.ops.patcher, name)


@contextmanager
def _unsummed() -> Iterator[list[Rows]]:
    """Make `reduce_grouped` collect rows and map of plain sums over experts instead of summing.

    For every other call, the function of the engine or of another patch runs.
    """
    library = sources.module(_MATMUL)
    summing = library.reduce_grouped
    rows: list[Rows] = []

    def reduce_grouped(
        x: Any,
        indx: Any,
        out: Any,
        out_mx_scale: Any,
        fused_activation: Any,
        epilogue: Any,
        **more: Any,
    ) -> Any:
        call = (x, indx, out, out_mx_scale, fused_activation, epilogue)
        if indx is None or out_mx_scale is not None:
            return summing(*call, **more)
        a_row_each = x.shape[:3] == (1, 1, indx.numel()) and x.dtype == out.dtype
        if not a_row_each or does_more(fused_activation, epilogue, more):
            return summing(*call, **more)
        rows.append((x[0, 0], indx))
        return out, None

    library.reduce_grouped = reduce_grouped
    try:
        yield rows
    finally:
        library.reduce_grouped = summing


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
