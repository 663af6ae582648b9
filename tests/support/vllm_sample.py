"""What test_vllm and others share."""

from __future__ import annotations

from typing import Any

import torch

EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


def _reference(library: dict[str, Any], logits: torch.Tensor, top_k: int) -> Any:
    """`routing_torch`; its histogram is of floats, since the CPU has none of integers."""
    values, index = library["topk_torch"](logits, top_k, None)
    values = torch.softmax(values, dim=-1)
    index, order = torch.sort(index, dim=1)
    values = torch.gather(values, 1, order).reshape(-1)
    flat = index.reshape(-1).to(torch.int32)
    gather = torch.argsort(flat, stable=True)
    scatter = torch.argsort(gather, stable=True)
    histogram = torch.bincount(flat, minlength=logits.shape[1]).int()
    tables = library["compute_expt_data_torch"](histogram, logits.shape[1], flat.numel())
    return (
        library["RoutingData"](values[gather], histogram, logits.shape[1], top_k, tables),
        library["GatherIndx"](src_indx=gather.int(), dst_indx=scatter.int()),
        library["ScatterIndx"](src_indx=scatter.int(), dst_indx=gather.int()),
    )
