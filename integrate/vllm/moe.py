"""vLLM's Triton mixture of experts: routing, and the sum over a token's experts.

`OAITritonMxfp4ExpertsMonolithic.apply` runs inside the operator `vllm::moe_forward`, which
compilers do not decompose. It calls plain functions, eagerly or during recording, so plain
functions are replaced. Tensors allocated during recording come from the graph's pool, like the
original's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_ROUTING = "triton_kernels.routing"
_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
TRITON: Mapping[str, str] = {"moe_backend": "triton"}
"""The backend with these functions; on compute capability 9.0 it is vLLM's default, too."""


class _Function(VllmPoint):
    """A patch point at one function of a module, which the engine looks up at every call."""

    module: ClassVar[str]
    function: ClassVar[str]
    wants: ClassVar[Mapping[str, str]] = TRITON

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        AttributePatch(sources.module(self.module), self.function).must_be_the_engines()
        return f"{self.module}.{self.function}"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        swap = AttributePatch(sources.module(self.module), self.function)
        swap.install(self._replacement(kernel, swap.original))
        self._swaps = [swap]

    @abstractmethod
    def _replacement(self, kernel: Dispatcher, original: Any) -> Any:
        """The replacement of the function."""


class Routing(_Function):
    """Top-k, softmax over it, and the sort of tokens by expert: five kernels of vLLM's."""

    name: ClassVar[str] = "triton_kernels.routing.routing"
    op: ClassVar[str] = "moe_route"
    module: ClassVar[str] = _ROUTING
    function: ClassVar[str] = "routing"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_ROUTING}:routing",
        f"{_ROUTING}:routing_from_bitmatrix",
        f"{_ROUTING}:sort_tokens",
        f"{_ROUTING}:_compute_expt_data_internal",
        f"{_ROUTING}:_unpack_into_dict",
        f"{_ROUTING}:RoutingData",
        f"{_ROUTING}:ExptData",
        f"{_ROUTING}:GatherIndx",
        f"{_ROUTING}:ScatterIndx",
        "triton_kernels.topk:topk_forward",
        "triton_kernels.topk_details._topk_forward:_topk_forward",
        f"{_MATMUL}:matmul_ogs",
        f"{_EXPERTS}:triton_kernel_moe_forward",
    )

    def _replacement(self, kernel: Dispatcher, original: Any) -> Any:
        library = sources.module(_ROUTING)

        def routing(
            logits: Any,
            n_expts_act: int,
            sm_first: bool = False,
            expt_indx: Any = None,
            simulated_ep: int = 1,
            n_rows: Any = None,
        ) -> Any:
            more = expt_indx, simulated_ep, n_rows
            if sm_first or more != (None, 1, None) or type(logits) is not torch.Tensor:
                kernel.book.reasons["another kind of routing"] += 1
                return original(logits, n_expts_act, sm_first, *more)
            experts = logits.shape[1]
            outputs = _outputs(library, logits, n_expts_act)
            if not kernel(logits, *outputs):
                return original(logits, n_expts_act)
            scales, gather, scatter, histogram, offsets, tile_offsets, tile_map = outputs
            data = library.ExptData(
                histogram,
                offsets,
                library._unpack_into_dict(tile_offsets),
                library._unpack_into_dict(tile_map),
            )
            return (
                library.RoutingData(scales, histogram, experts, n_expts_act, data),
                library.GatherIndx(src_indx=gather, dst_indx=scatter),
                library.ScatterIndx(src_indx=scatter, dst_indx=gather),
            )

        return routing


def _outputs(library: Any, logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """Allocate the outputs of `moe_route`, each separately, so that each is aligned.

    Returns:
        Scales [tokens * top_k]; then int32: gather and scatter index [tokens * top_k], histogram
        [experts], token offsets [experts + 1], tile offsets [sizes, experts + 1] and tile map
        [sizes, tiles] for blocks of 16, 32, 64 and 128 rows.
    """
    tokens, experts = logits.shape
    gates = tokens * top_k
    smallest = 1 << library.block_m_log2_start
    sizes = 8 - library.block_m_log2_start
    tiles = gates if gates <= experts else experts - 1 - (experts - gates - 1) // smallest

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    return (
        torch.empty(gates, dtype=logits.dtype, device=logits.device),
        new(gates),
        new(gates),
        new(experts),
        new(experts + 1),
        new(sizes, experts + 1),
        new(sizes, tiles),
    )


class Reduce(_Function):
    """The sum over a token's experts, after the second matmul: `_reduce_grouped`."""

    name: ClassVar[str] = "triton_kernels.matmul_ogs.reduce_grouped"
    op: ClassVar[str] = "moe_reduce"
    module: ClassVar[str] = _MATMUL
    function: ClassVar[str] = "reduce_grouped"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_MATMUL}:reduce_grouped",
        f"{_MATMUL}:matmul_ogs",
        f"{_MATMUL}:init_allocation",
        f"{_MATMUL}:apply_allocation",
        "triton_kernels.matmul_ogs_details._reduce_grouped:_reduce_grouped",
        f"{_EXPERTS}:triton_kernel_fused_experts",
    )

    def _replacement(self, kernel: Dispatcher, original: Any) -> Any:
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
            if indx is None:
                # after the first matmul there is nothing to sum
                return original(*call, **more)
            if out_mx_scale is not None or does_more(fused_activation, epilogue, more):
                kernel.book.reasons["more than a sum"] += 1
            elif kernel(x.squeeze(1), indx, out.new_empty((0, indx.shape[1])), out.squeeze(0)):
                return out, None
            return original(*call, **more)

        return reduce_grouped


def summed(rows: Any, row_map: Any, out: Any, out_flex: Any = None) -> Any:
    """Sum over each token's experts with vLLM's function, called as in `matmul_ogs`.

    The function is looked up at every call, since it is a patch point, too.

    Args:
        rows: [splits, 1, expert_rows, hidden].
        row_map: int32 [tokens, top_k].
        out: [1, tokens, hidden], which is written and returned.
        out_flex: vLLM's scales of the output.
    """
    library = sources.module(_MATMUL)
    result, _ = library.reduce_grouped(
        rows,
        row_map,
        out,
        None,
        library.FusedActivation(),
        library.Epilogue(library.FnSpecs.default(), (), (), False),
        x_flex=library.InFlexData(),
        out_flex=library.OutFlexData() if out_flex is None else out_flex,
        x_mx_scale=None,
        out_dtype=out.dtype,
        flexpoint_saturate_inf=False,
    )
    return result


def does_more(fused_activation: Any, epilogue: Any, more: dict[str, Any]) -> bool:
    """Whether an activation, an epilogue or scales are fused into the sum."""
    x_flex, out_flex = more.get("x_flex"), more.get("out_flex")
    scales = [
        more.get("x_mx_scale"),
        *([x_flex.scale, x_flex.dtype] if x_flex is not None else []),
        *([*out_flex, out_flex.dtype] if out_flex is not None else []),
    ]
    fused = fused_activation.specs.fn, epilogue.specs.fn
    return any(item is not None for item in (*scales, *fused))
