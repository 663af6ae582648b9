"""What test_vllm and others share."""

from __future__ import annotations

from typing import Any

import torch

from patcher.integrate.vllm import sources

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


def packed(experts: int, columns: int, depth: int, seed: int) -> tuple[Any, Any, torch.Tensor]:
    """Random weights and scales as `swizzled` gives them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (experts, columns, depth // 2), generator=generator)
    exponents = torch.randint(118, 124, (experts, columns, depth // 32), generator=generator)
    return swizzled(drawn.to(torch.uint8), exponents.to(torch.uint8))


def swizzled(
    bits: torch.Tensor, scales: torch.Tensor, num_warps: int = 8
) -> tuple[Any, Any, torch.Tensor]:
    """Weights and scales as `_swizzle_mxfp4` leaves them on compute capability 9.0, and the same
    as numbers [experts, depth, columns].

    Args:
        bits: [experts, columns, depth / 2], two numbers a byte.
        scales: [experts, columns, depth / 32].
        num_warps: of the kernel.
    """
    library = sources.part("triton_kernels.tensor:convert_layout").__globals__
    layouts = sources.part("triton_kernels.tensor_details.layout:HopperMXValueLayout")
    scaling = sources.part("triton_kernels.tensor_details.layout:HopperMXScaleLayout")
    weights = library["convert_layout"](
        library["wrap_torch_tensor"](bits.mT, dtype=library["FP4"]), layouts, mx_axis=1
    )
    scale = library["convert_layout"](
        library["wrap_torch_tensor"](scales.mT), scaling, mx_axis=1, num_warps=num_warps
    )
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    drawn, exponents = bits.int(), scales.float()
    codes = torch.stack((drawn & 15, drawn >> 4), -1).flatten(-2)
    numbers = torch.cat((table, -table))[codes]
    return weights, scale, (numbers * 2.0 ** (exponents - 127.0).repeat_interleave(32, 2)).mT
