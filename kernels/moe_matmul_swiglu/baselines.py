"""Baselines: the kernel that vLLM ships, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns
(output,). torch.compile is missing: it has no grouped matmul of packed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _eager(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    bias: Tensor,
    gather_index: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_map: Tensor,
    output: Tensor,
    alpha: float,
    limit: float,
) -> tuple[Tensor]:
    # every expert computes every row, since the host does not know the number of rows per expert
    count = len(gather_index)
    rows = x[gather_index.long() // (count // len(x))].float()
    place = torch.arange(count, device=x.device)
    chosen = torch.searchsorted(token_offsets.long(), place, right=True) - 1
    hidden = rows.new_zeros(count, bias.shape[1])
    for expert in range(len(weights)):
        wide = dequantised(weights[expert], scales[expert], bias.shape[1])
        mine = torch.addmm(bias[expert], rows, wide.T)
        hidden = torch.where((chosen == expert).unsqueeze(1), mine, hidden)
    gate, up = hidden[:, ::2].clamp(max=limit), hidden[:, 1::2].clamp(-limit, limit)
    return ((gate * torch.sigmoid(alpha * gate) * (up + 1)).to(output.dtype),)


def dequantised(weights: Tensor, scales: Tensor, columns: int) -> Tensor:
    """One expert's weights, float32 [columns, k], unfolded from Hopper's layout axis by axis."""
    depth = weights.shape[1] // 2
    word = weights.view(torch.int32)
    fields = torch.stack([word, word << 3, word << 6], -1) >> 6
    last = (word >> 5 & 0x02000200) | (word >> 9 & 0x00060006) | (word >> 13 & 0x00010001)
    both = torch.cat((fields, last.unsqueeze(-1)), -1)
    halves = torch.stack((both, both >> 16), -1)
    # bits 2 to 0 are the code and bit 9 is the sign, as in a half shifted by six bits
    bits = torch.arange(0x208, device=weights.device)
    code = bits & 7
    # four times the number: 0, 2, then 4, 6, which double with each exponent
    size = torch.where(code < 2, code * 2, (2 + (code & 1)) << (code >> 1)).float()
    table = torch.where((bits & 0x200) != 0, -size, size) * 0.25
    number = table.index_select(0, (halves & 0x207).flatten())
    # n: 16s, pair, odd; k: 64s, odd pair, 16s; k's 8, n's 8; odd k
    number = number.view(columns // 16, 4, depth // 64, 2, 4, 4, 2, 2, 2)
    number = number.permute(0, 7, 1, 3, 2, 5, 6, 4, 8).reshape(columns, depth)
    # n: 256s, 16s; k: 64s; n's 128, n % 8; k's 32; n's 8
    exponent = scales.reshape(-1, 8, depth // 64, 2, 8, 2, 2).permute(0, 3, 1, 6, 4, 2, 5)
    scale = torch.exp2(exponent.reshape(-1, depth // 32)[:columns].float() - 127)
    return number * scale.repeat_interleave(32, 1)


def eager(device: str) -> Baseline:
    return _eager


def engine(device: str) -> Callable[..., None]:
    """`matmul_ogs` as vLLM calls it on compute capability 9.0, for tensors of the contract.

    Raises:
        ImportError: it does not run on this machine, with the reason.
    """
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        raise ImportError("vLLM lays weights out like this for compute capability 9.0 alone")
    from vllm.utils.import_utils import has_triton_kernels

    if not has_triton_kernels():  # this also aliases vLLM's copy as triton_kernels
        raise ImportError("this vLLM has no triton_kernels")
    # import through the module that uses them: vLLM's alias makes each file importable under two
    # names, as two modules with different classes
    from triton_kernels.matmul_ogs import FP4, PrecisionConfig, RoutingData, Storage, matmul_ogs
    from triton_kernels.matmul_ogs import Tensor as Packed
    from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
    from triton_kernels.routing import ExptData
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    # as vLLM's _swizzle_mxfp4 does there
    update_opt_flags_constraints({"split_k": 1})

    def run(
        x: Tensor,
        weights: Tensor,
        scales: Tensor,
        bias: Tensor,
        tables: tuple[Tensor, Tensor, Tensor],
        top_k: int,
        output: Tensor,
        **more: Any,
    ) -> None:
        histogram, token_offsets, tile_map = tables
        (experts, columns), depth = bias.shape, x.shape[1]
        if len(output) // experts > 16 or x.dtype != torch.bfloat16:
            raise ImportError("vLLM's kernel takes bfloat16, and here tiles of more than 16 rows")
        shape = [experts, depth // 32, columns]
        values = HopperMXValueLayout([experts, depth // 2, columns], mx_axis=1)
        numbers = Storage(weights.mT, values)
        scale = Storage(scales.mT, HopperMXScaleLayout(shape, mx_axis=1, num_warps=8))
        # the second one is read only if tiles are spread over several dies
        data = ExptData(histogram, token_offsets, {16: token_offsets}, {16: tile_map})
        matmul_ogs(
            x,
            Packed(numbers, dtype=FP4, shape=[experts, depth, columns]),
            bias,
            RoutingData(None, histogram, experts, top_k, data),
            precision_config=PrecisionConfig(weight_scale=Packed(scale, shape=shape)),
            y=output.unsqueeze(0),
            **more,
        )

    return run


def vllm(device: str) -> Baseline:
    ogs = engine(device)
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
    from triton_kernels.routing import GatherIndx
    from triton_kernels.swiglu import swiglu_fn

    specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))

    def run(
        x: Tensor,
        weights: Tensor,
        scales: Tensor,
        bias: Tensor,
        gather_index: Tensor,
        histogram: Tensor,
        token_offsets: Tensor,
        tile_map: Tensor,
        output: Tensor,
        alpha: float,
        limit: float,
    ) -> None:
        ogs(
            *(x, weights, scales, bias, (histogram, token_offsets, tile_map)),
            *(len(gather_index) // len(x), output),
            gather_indx=GatherIndx(gather_index, gather_index),
            fused_activation=FusedActivation(specs, (alpha, limit), 2),
        )

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {"vllm": vllm, "eager": eager}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
