"""Baselines: the routing that vLLM ships, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline returns the written tensors in the
order of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _eager(
    logits: Tensor,
    gate_scales: Tensor,
    gather_index: Tensor,
    scatter_index: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_offsets: Tensor,
    tile_map: Tensor,
) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    device, top_k = logits.device, gather_index.shape[0] // tokens
    # a stable sort, since torch.topk does not define the order of equal logits
    chosen = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = chosen.sort(1).values
    scales = torch.softmax(logits.gather(1, chosen).float(), 1).to(logits.dtype)
    flat = chosen.flatten()
    gather = torch.argsort(flat, stable=True)
    counts = (flat.unsqueeze(1) == torch.arange(experts, device=device)).sum(0)
    blocks = (1 << torch.arange(4, 8, device=device)).unsqueeze(1)  # 16, 32, 64, 128
    tiles = (counts + blocks - 1) // blocks
    ends = tiles.cumsum(1)
    place = torch.arange(tile_map.shape[1], device=device).repeat(4, 1)
    expert = torch.searchsorted(ends, place, right=True)
    starts = torch.nn.functional.pad(ends, (1, 0))
    packed = (place - starts.gather(1, expert)) * 65536 + expert
    return (
        scales.flatten()[gather],
        gather.int(),
        torch.argsort(gather).int(),
        counts.int(),
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        starts.int(),
        torch.where(place < ends[:, -1:], packed, -1).int(),
    )


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def vllm(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("vLLM's kernels need a CUDA device")
    from vllm.utils.import_utils import has_triton_kernels

    if not has_triton_kernels():  # this also aliases vLLM's copy as triton_kernels
        raise ImportError("this vLLM has no triton_kernels")
    from triton_kernels.routing import routing

    def run(logits: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        top_k = outputs[1].shape[0] // logits.shape[0]
        data, gather, scatter = routing(logits, top_k, sm_first=False)
        expert = data.expt_data
        # views: each of the engine's dictionaries holds the rows of one tensor
        return (
            data.gate_scal,
            gather.src_indx,
            scatter.src_indx,
            expert.hist,
            expert.token_offs_raw,
            _whole(expert.token_offs_pad),
            _whole(expert.block_pid_map),
        )

    return run


def _whole(rows: dict[int, Tensor]) -> Tensor:
    first, second = rows[16], rows[32]
    stride = second.storage_offset() - first.storage_offset()
    return first.as_strided((len(rows), first.shape[0]), (stride, 1))


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
