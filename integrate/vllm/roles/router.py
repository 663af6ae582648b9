"""The router of vLLM's Triton experts: top-k, softmax, and the sort of tokens by expert.

`OAITritonMxfp4ExpertsMonolithic.apply` runs inside the operator `vllm::moe_forward`, which
compilers do not decompose. It calls plain functions, eagerly or during recording, so plain
functions are replaced. Tensors allocated during recording come from the graph's pool, like the
original's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.roles.triton_experts import TritonExperts
from patcher.integrate.vllm.swap import SharedPatch

_ROUTING = "triton_kernels.routing"
_MATMUL = "triton_kernels.matmul_ogs"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


Tables = tuple[torch.Tensor, ...]
"""The outputs of `moe_route`; see `new_tables`."""

RoutingPart = Callable[[Any, int, bool], Any]
"""Takes logits, top-k and whether it is the plain routing of a tensor; gives what `routing`
returns, or None to leave it to others."""


class Routing(TritonExperts):
    """Top-k, softmax over it, and the sort of tokens by expert: five kernels of vLLM's."""

    name: ClassVar[str] = "router.oai"
    op: ClassVar[str] = "moe_route"
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

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        place_of_routing(self.name).must_have_room()
        return f"{_ROUTING}.routing"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = place_of_routing(self.name)
        place.install(_routing_by(kernel))
        self._swaps = [place]


def _routing_by(kernel: Dispatcher) -> RoutingPart:
    """The part of the kernel of `moe_route`."""

    def route(logits: Any, top_k: int, plain: bool) -> Any:
        if not plain:
            kernel.book.reasons["another kind of routing"] += 1
            return None
        outputs = new_tables(logits, top_k)
        return routed(outputs, logits.shape[1], top_k) if kernel(logits, *outputs) else None

    return route


def place_of_routing(point: str) -> SharedPatch:
    """The place of a point's `RoutingPart`.

    Args:
        point: the name of the patch point.
    """
    return SharedPatch(sources.module(_ROUTING), "routing", point, _sharing)


def _sharing(original: Any, parts: dict[str, RoutingPart]) -> Any:
    def routing(
        logits: Any,
        n_expts_act: int,
        sm_first: bool = False,
        expt_indx: Any = None,
        simulated_ep: int = 1,
        n_rows: Any = None,
    ) -> Any:
        more = expt_indx, simulated_ep, n_rows
        plain = not sm_first and more == (None, 1, None) and type(logits) is torch.Tensor
        # who has routed already comes before who routes
        for _, part in sorted(parts.items(), key=lambda item: item[0] == Routing.name):
            found = part(logits, n_expts_act, plain)
            if found is not None:
                return found
        return original(logits, n_expts_act, sm_first, *more)

    return routing


def routed(tables: Tables, experts: int, top_k: int) -> Any:
    """What `routing` returns of the outputs of `moe_route`."""
    library = sources.module(_ROUTING)
    scales, gather, scatter, histogram, offsets, tile_offsets, tile_map = tables
    data = library.ExptData(
        histogram,
        offsets,
        library._unpack_into_dict(tile_offsets),
        library._unpack_into_dict(tile_map),
    )
    return (
        library.RoutingData(scales, histogram, experts, top_k, data),
        library.GatherIndx(src_indx=gather, dst_indx=scatter),
        library.ScatterIndx(src_indx=scatter, dst_indx=gather),
    )


def new_tables(logits: torch.Tensor, top_k: int) -> Tables:
    """Allocate the outputs of `moe_route`, each separately, so that each is aligned.

    Returns:
        Scales [tokens * top_k]; then int32: gather and scatter index [tokens * top_k], histogram
        [experts], token offsets [experts + 1], tile offsets [sizes, experts + 1] and tile map
        [sizes, tiles] for blocks of 16, 32, 64 and 128 rows.
    """
    library = sources.module(_ROUTING)
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
