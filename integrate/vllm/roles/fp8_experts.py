"""vLLM's experts in fp8 with block scales: rows and their routing in, the weighted sums out.

Each layer's method keeps a kernel object, whatever loader made it. Its `apply` quantises x, runs
the experts and sums over them; on Hopper without expert parallelism these are Triton's, or, if one
asks for it, DeepGEMM's, which leave weights and scales as a checkpoint has them. It runs inside the
operator `vllm::moe_forward`, which compilers do not decompose.

FlashInfer's experts have up before gate, CUTLASS's take no blocks, and those of Marlin, Humming and
TensorRT-LLM store weights in a layout of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from patcher.bench import load_op
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_MOE = "vllm.model_executor.layers.fused_moe"
_KERNEL = f"{_MOE}.modular_kernel"
_IMPL = f"{_KERNEL}:FusedMoEKernelModularImpl"
_PREPARE = f"{_MOE}.prepare_finalize.no_dp_ep"
_PREPARING = f"{_PREPARE}:MoEPrepareAndFinalizeNoDPEPModular"
_TRITON = f"{_MOE}.experts.triton_moe:TritonExperts"
_DEEP_GEMM = f"{_MOE}.experts.triton_deep_gemm_moe:TritonOrDeepGemmExperts"
_HELD = f"{_MOE}.routed_experts:RoutedExperts"
_RUNNER = f"{_MOE}.runner.moe_runner"
_EXPERTS = _TRITON, _DEEP_GEMM
_ROUTERS = (
    f"{_MOE}.router.fused_topk_router:FusedTopKRouter",
    f"{_MOE}.router.fused_topk_bias_router:FusedTopKBiasRouter",
    f"{_MOE}.router.grouped_topk_router:GroupedTopKRouter",
)
"""Those that give each token different experts, or -1."""
_TOLERANCE = 0.08
"""Of a block of outputs, by norm: fp8 rounds what is between the two matmuls by up to 1/16."""


class Fp8Experts(VllmPoint):
    """Experts whose blocks of weights have one float32 scale each."""

    name: ClassVar[str] = "experts.fp8_block"
    op: ClassVar[str] = "moe_experts_fp8_block"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_KERNEL}:FusedMoEKernel.apply",
        f"{_IMPL}.apply",
        f"{_IMPL}._prepare",
        f"{_IMPL}._fused_experts",
        f"{_IMPL}._finalize",
        f"{_PREPARE}:_quantize_input",
        f"{_PREPARING}.prepare",
        f"{_PREPARING}.finalize",
        f"{_TRITON}.apply",
        f"{_TRITON}.activation",
        f"{_DEEP_GEMM}.__init__",
        *(f"{router}._compute_routing" for router in _ROUTERS),
    )

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()
        """Kernel objects of layers that were looked at and tried; any other is the engine's."""

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
        reason = _unlike(layer, kernel) or self._trial(layer, kernel)
        if kernel is not None:
            self._taken.discard(kernel)
            if self._swaps and reason is None:
                self._taken.add(kernel)
        return reason

    def constants(self, layer: Any) -> Mapping[str, Tensor]:
        held = layer.routed_experts
        scales = layer._quant_method.moe_kernel.fused_experts.quant_config
        found = {
            "w1": held.w13_weight,
            "w1_scale": scales.w1_scale,
            "w2": held.w2_weight,
            "w2_scale": scales.w2_scale,
        }
        return {name: tensor.data for name, tensor in found.items()}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = _place()
        place.install(_replacement(place.original, kernel, self._taken))
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
        count, device = len(given["w1"]), given["w1"].device
        experts = torch.tensor(sorted({0, count - 1}), device=device)
        order = torch.arange(len(experts), device=device)
        order = torch.stack([order, order.flip(0)])
        gains = torch.tensor([0.75, 0.25], device=device)[: len(experts)].repeat(2, 1)
        x = _rows(given).to(layer.moe_config.in_dtype)
        original = getattr(type(kernel).apply, "__wrapped__", type(kernel).apply)
        routing = gains, experts[order].int(), held.activation, count, None, False
        got = original(kernel, x, held.w13_weight, held.w2_weight, *routing).double()
        # indexing needs a dtype of integers
        codes = {name: tensor.view(torch.uint8)[experts] for name, tensor in given.items()}
        picked = {name: codes[name].view(given[name].dtype) for name in codes}
        expected = _expected(x, picked, gains, order)
        depth = given["w2_scale"].shape[1]
        error, size = (
            each.unflatten(1, (depth, -1)).square().sum((0, 2))
            for each in (got - expected, expected)
        )
        fits = error <= _TOLERANCE**2 * size.clamp_min(1e-4 * size.mean())
        return None if fits.all() else "it computes something else"


def _place() -> AttributePatch:
    return AttributePatch(sources.module(_KERNEL).FusedMoEKernel, "apply")


def _replacement(original: Any, dispatch: Dispatcher, taken: weakref.WeakSet[Any]) -> Any:
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
                scales, output = experts.quant_config, torch.empty_like(hidden_states)
                weights = w1, scales.w1_scale, w2, scales.w2_scale
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


def _unlike(layer: Any, kernel: Any) -> str | None:
    """Why a layer is not the op's, by its classes, settings and weights; None if it is."""
    experts = getattr(kernel, "fused_experts", layer._quant_method)
    if not any(type(experts) is sources.part(name) for name in _EXPERTS):
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
    return _layout(held.w13_weight, scales.w1_scale, held.w2_weight, scales)


def _layout(w1: Tensor, w1_scale: Tensor | None, w2: Tensor, scales: Any) -> str | None:
    """Why weights and scales are not as in the contract."""
    block, w2_scale = scales.block_shape or (0, 1), scales.w2_scale
    if block[0] != block[1] or block[0] % 32 or w1_scale is None or w2_scale is None:
        return "blocks that are no squares of a multiple of 32"
    given = w1, w1_scale, w2, w2_scale
    if all(tensor.dim() == 3 and tensor.is_contiguous() for tensor in given):
        count, depth, wide = w2_scale.shape
        hidden, inner = depth * block[0], wide * block[0]
        shapes = (2 * inner, hidden), (2 * wide, depth), (hidden, inner), (depth, wide)
        quantised, plain = torch.float8_e4m3fn, torch.float32
        dtypes = quantised, plain, quantised, plain
        if all(
            tensor.shape == (count, *shape) and tensor.dtype == dtype
            for tensor, shape, dtype in zip(given, shapes, dtypes, strict=True)
        ):
            return None
    return f"weights in another layout: {', '.join(map(_shown, given))}"


def _rows(given: Mapping[str, Tensor]) -> Tensor:
    """Two rows [2, hidden] of x, in float32, which fp8 holds exactly with the scale of any engine:
    the largest number of each block is 448 times a power of two."""
    weight = given["w1"]
    depth, hidden = given["w1_scale"].shape[2], weight.shape[2]
    steps = torch.linspace(448, -448, 32, device=weight.device).to(torch.float8_e4m3fn).float()
    block = torch.arange(hidden, device=weight.device) // (hidden // depth)
    row = steps.repeat(hidden // 32) * torch.exp2(-8.0 - block % 3)
    return torch.stack([row, -row.roll(5)])


def _expected(x: Tensor, given: Mapping[str, Tensor], gains: Tensor, ids: Tensor) -> Tensor:
    """The op's reference in float64, as a sum over blocks of what lies between the matmuls: in
    float64, a whole expert may take gigabytes."""
    (_, depth, wide), total = given["w2_scale"].shape, torch.zeros_like(x, dtype=torch.float64)
    block = x.shape[1] // depth
    halves = given["w1"].view(torch.uint8).chunk(2, 1)
    for number in range(wide):
        part = slice(number * block, (number + 1) * block)
        both = torch.cat([half[:, part] for half in halves], 1)
        total += load_op(Fp8Experts.op).reference(
            x=x,
            w1=both.view(given["w1"].dtype),
            w1_scale=given["w1_scale"][:, number::wide],
            w2=given["w2"][:, :, part],
            w2_scale=given["w2_scale"][:, :, number : number + 1],
            gains=gains,
            ids=ids,
            output=x,
        )["output"]
    return total


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
