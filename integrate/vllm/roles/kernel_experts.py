"""The common part of points of vLLM's experts: rows and their routing in, the weighted sums out.

Each layer's method keeps a kernel object, whatever loader made it. Its `apply` quantises x if the
weights are quantised, runs the experts and sums over them. It runs inside the operator
`vllm::moe_forward`, which compilers do not decompose.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

MOE = "vllm.model_executor.layers.fused_moe"
_KERNEL = f"{MOE}.modular_kernel"
_IMPL = f"{_KERNEL}:FusedMoEKernelModularImpl"
_PREPARE = f"{MOE}.prepare_finalize.no_dp_ep"
_PREPARING = f"{_PREPARE}:MoEPrepareAndFinalizeNoDPEPModular"
TRITON = f"{MOE}.experts.triton_moe:TritonExperts"
_HELD = f"{MOE}.routed_experts:RoutedExperts"
_RUNNER = f"{MOE}.runner.moe_runner"
_ROUTERS = (
    f"{MOE}.router.fused_topk_router:FusedTopKRouter",
    f"{MOE}.router.fused_topk_bias_router:FusedTopKBiasRouter",
    f"{MOE}.router.grouped_topk_router:GroupedTopKRouter",
)
"""Those that give each token different experts, or -1."""
ROUTING = tuple(f"{router}._compute_routing" for router in _ROUTERS)


class KernelExperts(VllmPoint):
    """Experts of a layer by a kernel object."""

    parts: ClassVar[tuple[str, ...]] = (
        f"{_KERNEL}:FusedMoEKernel.apply",
        f"{_IMPL}.apply",
        f"{_IMPL}._prepare",
        f"{_IMPL}._fused_experts",
        f"{_IMPL}._finalize",
        f"{_PREPARE}:_quantize_input",
        f"{_PREPARING}.prepare",
        f"{_PREPARING}.finalize",
        f"{TRITON}.apply",
        f"{TRITON}.activation",
        *ROUTING,
    )
    kinds: ClassVar[tuple[str, ...]]
    """The classes of experts that compute the op."""
    tolerance: ClassVar[float]
    """Of a block of outputs, by norm."""

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()
        """Kernel objects of layers that were looked at and tried; any other is the engine's."""

    @abstractmethod
    def layout(self, held: Any, scales: Any) -> str | None:
        """Why weights and scales are not as in the contract; None if they are."""

    @abstractmethod
    def weights(self, w1: Tensor, w2: Tensor, scales: Any) -> tuple[Tensor, ...]:
        """What the op is given between the rows and the gains."""

    @abstractmethod
    def rows(self, given: Mapping[str, Tensor]) -> Tensor:
        """Two rows [2, hidden] of x in float32 to try a layer on."""

    @abstractmethod
    def expected(
        self, x: Tensor, given: Mapping[str, Tensor], gains: Tensor, ids: Tensor
    ) -> Tensor:
        """The op's reference in float64, a part of each expert at a time: a whole one may take
        gigabytes."""

    @abstractmethod
    def blocks(self, given: Mapping[str, Tensor]) -> int:
        """Into how many blocks a row of outputs is cut, each compared by norm."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        place = _place()
        place.must_be_the_engines()
        engine.must_allow_another("experts")
        return f"{_KERNEL}.{place.label}"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_RUNNER).MoERunner)

    def applies(self, layer: Any) -> str | None:
        """See `VllmPoint`. Only layers for which this said None since the point was installed run
        the kernel."""
        kernel = layer._quant_method.moe_kernel
        reason = _unlike(self, layer, kernel) or self._trial(layer, kernel)
        if kernel is not None:
            self._taken.discard(kernel)
            if self._swaps and reason is None:
                self._taken.add(kernel)
        return reason

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = _place()
        place.install(_replacement(self, place.original, kernel))
        self._swaps.append(place)

    def remove(self) -> None:
        self._taken.clear()
        super().remove()

    @torch.no_grad()
    def _trial(self, layer: Any, kernel: Any) -> str | None:
        """Why a layer does not compute the op, by two rows for its first and its last expert; None
        if it does."""
        given, held = self.constants(layer), layer.routed_experts
        if sources.module("vllm.platforms").current_platform.is_cuda() and not all(
            tensor.is_cuda for tensor in given.values()
        ):
            return "offloaded weights"
        count, device = len(held.w13_weight), held.w13_weight.device
        experts = torch.tensor(sorted({0, count - 1}), device=device)
        order = torch.arange(len(experts), device=device)
        order = torch.stack([order, order.flip(0)])
        gains = torch.tensor([0.75, 0.25], device=device)[: len(experts)].repeat(2, 1)
        x = self.rows(given).to(layer.moe_config.in_dtype)
        original = getattr(type(kernel).apply, "__wrapped__", type(kernel).apply)
        routing = gains, experts[order].int(), held.activation, count, None, False
        got = original(kernel, x, held.w13_weight, held.w2_weight, *routing).double()
        # indexing needs a dtype of integers
        codes = {name: tensor.view(torch.uint8)[experts] for name, tensor in given.items()}
        picked = {name: codes[name].view(given[name].dtype) for name in codes}
        expected = self.expected(x, picked, gains, order)
        blocks = self.blocks(given)
        error, size = (
            each.unflatten(1, (blocks, -1)).square().sum((0, 2))
            for each in (got - expected, expected)
        )
        fits = error <= self.tolerance**2 * size.clamp_min(1e-4 * size.mean())
        return None if fits.all() else "it computes something else"


def _place() -> AttributePatch:
    return AttributePatch(sources.module(_KERNEL).FusedMoEKernel, "apply")


def _replacement(point: KernelExperts, original: Any, dispatch: Dispatcher) -> Any:
    taken = point._taken

    def apply(
        kernel: Any,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Any:
        how = activation, global_num_experts, expert_map, apply_router_weight_on_input
        if kernel in taken:
            experts = kernel.fused_experts
            reason = _differs(experts, len(w1), *how)
            if reason is None:
                weights = point.weights(w1, w2, experts.quant_config)
                output = torch.empty_like(hidden_states)
                if dispatch(hidden_states, *weights, topk_weights, topk_ids, output):
                    return output
                del output  # tens of megabytes in a long prefill
            else:
                dispatch.book.reasons[reason] += 1
        routed = hidden_states, w1, w2, topk_weights, topk_ids
        # without ranks to send tokens to, vLLM runs shared experts elsewhere
        return original(kernel, *routed, *how, shared_experts, shared_experts_input)

    return apply


def _differs(
    experts: Any, held: int, activation: Any, of_all: int, expert_map: Any, on_input: bool
) -> str | None:
    """Why a call is not the op's, which some features decide anew for each call."""
    if expert_map is not None:
        return "experts shared by several ranks"
    if of_all not in (-1, held):
        return "experts fused with shared ones"
    if on_input:
        return "gains that scale x"
    if activation.value != "silu":
        return f"activation {activation.value}"
    if getattr(experts, "_lora_context", None) is not None:
        return "LoRA"
    if getattr(experts, "post_gemm2_hook", None) is not None:
        return "a sum that the model fuses"
    return None


def _unlike(point: KernelExperts, layer: Any, kernel: Any) -> str | None:
    """Why a layer is not the op's, by its classes, settings and weights; None if it is."""
    experts = getattr(kernel, "fused_experts", layer._quant_method)
    if not any(type(experts) is sources.part(name) for name in point.kinds):
        return f"experts by {type(experts).__name__}"
    config, held, scales = experts.moe_config, layer.routed_experts, experts.quant_config
    ways = config.moe_parallel_config
    if ways.enable_eplb:
        return "experts that move between ranks"
    if ways.use_ep:
        return "experts shared by several ranks"
    if type(kernel.prepare_finalize) is not sources.part(_PREPARING):
        return f"rows by {type(kernel.prepare_finalize).__name__}"
    if config.is_lora_enabled:
        return "LoRA"
    if type(held) is not sources.part(_HELD):
        return f"weights by {type(held).__name__}"
    if all(type(layer.router) is not sources.part(name) for name in _ROUTERS):
        return f"routing by {type(layer.router).__name__}"
    if getattr(layer.router, "_hash_indices_table", None) is not None:
        return "routing by a table of tokens"
    of_all, on_input = held.global_num_experts, held.apply_router_weight_on_input
    how = held.activation, of_all, held.expert_map, on_input
    if (reason := _differs(experts, len(held.w13_weight), *how)) is not None:
        return reason
    if scales.w1_bias is not None or scales.w2_bias is not None:
        return "biases"
    bounds = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), scales
    more = ("swiglu_alpha", "swiglu_beta", "swiglu_limit"), config
    for names, where in (bounds, more):
        if any(getattr(where, name, None) is not None for name in names):
            return "a bounded activation"
    return point.layout(held, scales)


def shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
