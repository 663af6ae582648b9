"""The router of vLLM's Triton experts: top-k, softmax, and the sort of tokens by expert.

`OAITritonMxfp4ExpertsMonolithic.apply` runs inside the operator `vllm::moe_forward`, which
compilers do not decompose. It calls plain functions, eagerly or during recording, so plain
functions are replaced. Tensors allocated during recording come from the graph's pool, like the
original's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.roles.triton_experts import TritonFunction

_ROUTING = "triton_kernels.routing"
_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


class Routing(TritonFunction):
    """Top-k, softmax over it, and the sort of tokens by expert: five kernels of vLLM's."""

    name: ClassVar[str] = "router.oai"
    op: ClassVar[str] = "moe_route"
    module: ClassVar[str] = _ROUTING
    function: ClassVar[str] = "routing"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_ROUTING}:routing",
        f"{_ROUTING}:routing_from_bitmatrix",
        # vLLM replaces the library's `sort_tokens` by it
        f"{_EXPERTS}:_patch_legacy_routing_for_nonpow2_topk",
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
