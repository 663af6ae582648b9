"""vLLM's two expert matmuls of MXFP4 weights on compute capability 9.0.

`triton_kernel_fused_experts` calls `matmul_ogs` twice: with gather and SwiGLU, and with scatter,
whose rows in the order of experts are then summed by `reduce_grouped`. Both calls use one name of
one module, so the two patch points share one replacement; `reduce_grouped` is a separate point.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.roles.experts_sum import summed
from patcher.integrate.vllm.roles.triton_experts import TritonExperts
from patcher.integrate.vllm.swap import SharedPatch

_MATMUL = "triton_kernels.matmul_ogs"
_FLAGS = f"{_MATMUL}_details.opt_flags"
_LAYOUT = "triton_kernels.tensor_details.layout_details"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


class _Matmul(TritonExperts):
    """One of the two calls of `matmul_ogs`."""

    parts: ClassVar[tuple[str, ...]] = (
        f"{_MATMUL}:matmul_ogs",
        f"{_MATMUL}:init_allocation",
        f"{_MATMUL}:apply_allocation",
        f"{_MATMUL}:PrecisionConfig",
        f"{_MATMUL}:FlexCtx",
        f"{_MATMUL}:FusedActivation",
        f"{_MATMUL}_details._matmul_ogs:_matmul_ogs",
        f"{_FLAGS}:make_default_opt_flags_nvidia",
        f"{_LAYOUT}.hopper_value:HopperMXValueLayout",
        f"{_LAYOUT}.hopper_value:_pack_bits",
        f"{_LAYOUT}.hopper_scale:HopperMXScaleLayout",
        "triton_kernels.routing:RoutingData",
        "triton_kernels.routing:ExptData",
        "triton_kernels.routing:GatherIndx",
        "triton_kernels.routing:ScatterIndx",
        "triton_kernels.swiglu_details._swiglu:_swiglu_fn",
        "triton_kernels.swiglu_details._swiglu:compute_swiglu",
        "vllm.model_executor.layers.quantization.utils.mxfp4_utils:_swizzle_mxfp4",
        f"{_EXPERTS}:triton_kernel_moe_forward",
        f"{_EXPERTS}:triton_kernel_fused_experts",
        f"{_EXPERTS}:make_routing_data",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        for place in self._places():
            place.must_have_room()
        return f"{_EXPERTS}.matmul_ogs"

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        weight, precision, bias = self._held(layer.routed_experts, layer._quant_method)
        weights, scales = packed(weight, precision)
        return {"weights": weights, "scales": scales, "bias": bias}

    @abstractmethod
    def _held(self, experts: Any, method: Any) -> tuple[Any, Any, torch.Tensor]:
        """Weight, `PrecisionConfig` and bias of the matmul."""

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        for place in self._places():
            place.install(kernel)
            self._swaps.append(place)

    def _places(self) -> tuple[SharedPatch, SharedPatch]:
        experts = sources.module(_EXPERTS)
        return (
            SharedPatch(experts, "matmul_ogs", self.name, _dispatching),
            SharedPatch(experts, "make_routing_data", self.name, _marking),
        )


class GateUp(_Matmul):
    """The first call: gather, matmul, SwiGLU."""

    name: ClassVar[str] = "experts.gate_up.mxfp4"
    op: ClassVar[str] = "moe_matmul_swiglu"

    def _held(self, experts: Any, method: Any) -> tuple[Any, Any, torch.Tensor]:
        return experts.w13_weight, method.w13_precision_config, experts.w13_bias


class Down(_Matmul):
    """The second call: matmul and routing weights, then the engine's sum over a token's experts."""

    name: ClassVar[str] = "experts.down.mxfp4"
    op: ClassVar[str] = "moe_matmul_down"

    def _held(self, experts: Any, method: Any) -> tuple[Any, Any, torch.Tensor]:
        return experts.w2_weight, method.w2_precision_config, experts.w2_bias


def _dispatching(original: Any, kernels: dict[str, Dispatcher]) -> Any:
    """The replacement of `matmul_ogs`, with the kernels of the points that are in."""
    library = sources.module(_MATMUL)
    flags = sources.module(_FLAGS)
    swiglu = sources.module("triton_kernels.swiglu").swiglu_fn
    plain = library.PrecisionConfig()

    def matmul_ogs(
        x: Any,
        w: Any,
        bias: Any,
        routing_data: Any = None,
        gather_indx: Any = None,
        scatter_indx: Any = None,
        precision_config: Any = None,
        betas: Any = None,
        gammas: Any = None,
        out_alpha: Any = None,
        y: Any = None,
        fused_activation: Any = None,
        epilogue: Any = None,
    ) -> Any:
        call = (
            x,
            w,
            bias,
            routing_data,
            gather_indx,
            scatter_indx,
            precision_config,
            betas,
            gammas,
            out_alpha,
            y,
            fused_activation,
            epilogue,
        )
        first = gather_indx is not None
        kernel = kernels.get((GateUp if first else Down).name)
        if kernel is None:
            return original(*call)
        tensors = x, bias, y
        if any(item is not None for item in (betas, out_alpha, epilogue)) or not all(
            isinstance(item, torch.Tensor) for item in tensors
        ):
            reason: str | None = "another kind of matmul"
        elif flags._opt_flags is not None or flags._opt_flags_constraints.get("split_k") != 1:
            reason = "another split of K"
        else:
            reason = unlike(w, precision_config, plain) or _partial(routing_data)
        if reason is None and first:
            reason = _not_first(scatter_indx, gammas, y, fused_activation, swiglu)
        elif reason is None:
            reason = _not_second(x, w, scatter_indx, gammas, y, fused_activation, routing_data)
        if reason is not None:
            kernel.book.reasons[reason] += 1
            return original(*call)
        data = routing_data.expt_data
        held = packed(w, precision_config)
        tables = data.hist, data.token_offs_raw, data.block_pid_map[16]
        if first:
            inputs = x, *held, bias, gather_indx.src_indx, *tables, y[0]
            if kernel(*inputs, *fused_activation.fn_args):
                return y[0]
            return original(*call)
        row_map = scatter_indx.src_indx.view(-1, routing_data.n_expts_act)
        rows = x.new_empty((1, 1, x.shape[0], w.shape[-1]))
        if not kernel(x, *held, bias, gammas, row_map, *tables, rows[0, 0]):
            # hundreds of megabytes in a long prefill, which the engine allocates again
            del rows
            return original(*call)
        return summed(rows, row_map, y, precision_config.flex_ctx.out_data).squeeze(0)

    return matmul_ogs


def _marking(original: Any, kernels: dict[str, Dispatcher]) -> Any:
    """Mark the tables of `make_routing_data`, which may omit choices (experts of other ranks).

    The tables show that only after waiting for the GPU, so their origin is marked instead.
    """

    def make_routing_data(*args: Any, **more: Any) -> Any:
        result = original(*args, **more)
        result[0].patcher_partial = True
        return result

    return make_routing_data


def packed(w: Any, precision: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of a matmul as the contracts have them, without a copy."""
    return w.storage.data.mT, engine.scale_rows(precision.weight_scale, w.shape[1])


def unlike(w: Any, precision: Any, plain: Any) -> str | None:
    """Why these are not MXFP4 weights in the layout of `_swizzle_mxfp4` on compute capability 9.0.

    Args:
        w: the weights of one matmul.
        precision: its `PrecisionConfig`.
        plain: one without anything.

    Returns:
        A reason for receipts, or None if they are.
    """
    values, scales = _layout(w), _layout(getattr(precision, "weight_scale", None))
    names = getattr(values, "name", None), getattr(scales, "name", None)
    if names != ("HOPPER_VALUE", "HOPPER_SCALE"):
        return "another layout of weights"
    if (values.mma_version, values.mx_axis, scales.num_warps, scales.mx_axis) != (3, 1, 8, 1):
        return "another layout of weights"
    if replace(precision, weight_scale=None) != plain:
        return "another precision"
    return None


def _layout(tensor: Any) -> Any:
    return getattr(getattr(tensor, "storage", None), "layout", None)


def _partial(routing: Any) -> str | None:
    if routing is None or routing.expt_data is None or 16 not in routing.expt_data.block_pid_map:
        return "another kind of routing"
    if getattr(routing, "patcher_partial", False):
        return "routing that may leave experts out"
    return None


def _not_first(scatter: Any, gammas: Any, y: Any, activation: Any, swiglu: Any) -> str | None:
    if scatter is not None or gammas is not None or y.dim() != 3 or y.shape[0] != 1:
        return "another kind of matmul"
    if activation is None or activation.specs.fn is not swiglu or activation.reduction_n != 2:
        return "another activation"
    if activation.specs.fn_arg_names != ("alpha", "limit") or None in activation.fn_args:
        return "another activation"
    return None


def _not_second(
    x: Any, w: Any, scatter: Any, gammas: Any, y: Any, activation: Any, routing: Any
) -> str | None:
    if activation is not None:
        return "another activation"
    # with one choice per token, the engine's kernel scatters itself
    if scatter is None or not isinstance(gammas, torch.Tensor) or routing.n_expts_act == 1:
        return "another kind of matmul"
    if x.dim() != 2 or y.shape != (1, x.shape[0] // routing.n_expts_act, w.shape[-1]):
        return "another kind of matmul"
    return None if y.dtype == x.dtype else "another precision"
