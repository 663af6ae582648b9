"""Baselines: FlashAttention 3 and Triton's attention as vLLM calls them, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. vLLM's own two round the weights of values to
fp8, and err by that; FlashAttention rounds a query in T to fp8 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    window: Tensor,
    sinks: Tensor,
    dtype: torch.dtype,
    scale: float,
) -> Tensor:
    tokens, pages = block_table.shape
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = query.reshape(tokens, kv_heads, -1, head_dim).float()
    table = block_table.long().clamp_min(0)
    places = torch.arange(pages * block_size, device=query.device)
    length = lengths.unsqueeze(1)
    there = places < length
    if window.numel():
        there = there & (places >= length - window)
    # keys and values of other places may be anything, NaN included
    seen = there[:, None, :, None]
    keys, values = (
        cache[table]
        .reshape(tokens, pages * block_size, kv_heads, head_dim)
        .transpose(1, 2)
        .float()
        .where(seen, 0)
        for cache in (key_cache, value_cache)
    )
    factor = k_scale * scale * q_scale if q_scale.numel() else k_scale * scale
    scores = (heads @ keys.transpose(2, 3)) * factor
    scores = scores.masked_fill(~there[:, None, None], -torch.inf)
    if sinks.numel():
        more = sinks.float().view(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, more), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    found = (weights.to(dtype).float() @ values) * v_scale
    return found.where(length.view(tokens, 1, 1, 1) > 0, 0).to(dtype).view(tokens, -1)


def _with(attend: Callable[..., Tensor]) -> Baseline:
    def run(*args: Any) -> None:
        *given, out, scale = args
        out.copy_(attend(*given, out.dtype, scale))

    return run


def eager(device: str) -> Baseline:
    return _with(_attend)


def compiled(device: str) -> Baseline:
    return _with(torch.compile(_attend, dynamic=True))


def _left(sizes: list[int], window: Tensor) -> int:
    """How far a window goes to the left; read once, since all that are timed have one size."""
    if not window.numel():
        return -1
    if not sizes:
        sizes.append(int(window))
    return sizes[0] - 1


def vllm(device: str) -> Baseline:
    """vLLM 0.25.1 to 0.33.0: FlashAttentionImpl.forward, after Attention.forward's rounding."""
    if device != "cuda":
        raise ImportError("FlashAttention needs a CUDA device")
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version()
    if version != 3:
        raise ImportError("FlashAttention 3 has this kernel")
    sizes: list[int] = []

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_scale: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        window: Tensor,
        sinks: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        if out.dtype is torch.float32:
            raise ImportError("FlashAttention has no float32")
        kv_heads, head_dim = key_cache.shape[2:]
        factor = q_scale if q_scale.numel() else torch.ones_like(k_scale)
        if query.dtype is not key_cache.dtype:
            one = torch.ones_like(k_scale)  # a checkpoint's without a scale of queries
            query, _ = ops.scaled_fp8_quant(query.contiguous(), one)
        tokens, left = len(query), _left(sizes, window)
        flash_attn_varlen_func(
            q=query.view(tokens, -1, head_dim),
            k=key_cache,
            v=value_cache,
            out=out.view(tokens, -1, head_dim),
            cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=query.device),
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=block_table.shape[1] * key_cache.shape[1],
            softmax_scale=scale,
            causal=True,
            window_size=[left, 0 if window.numel() else -1],
            block_table=block_table,
            fa_version=version,
            q_descale=factor.expand(tokens, kv_heads),
            k_descale=k_scale.expand(tokens, kv_heads),
            v_descale=v_scale.expand(tokens, kv_heads),
            s_aux=sinks if sinks.numel() else None,
        )

    return run


def vllm_triton(device: str) -> Baseline:
    """vLLM 0.25.1 to 0.33.0: TritonAttentionImpl.forward, with its builder's buffers of parts."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    from vllm.v1.attention.backends.triton_attn import (
        MIN_LAUNCH_GRID_SIZE_2D,
        NUM_PAR_SOFTMAX_SEGMENTS,
    )
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    sizes: list[int] = []
    parts: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_scale: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        window: Tensor,
        sinks: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        kv_heads, head_dim = key_cache.shape[2:]
        in_fp8 = query.dtype is key_cache.dtype
        if q_scale.numel() and not in_fp8:
            raise ImportError("vLLM's kernel has no scale of a query in 16 bits")
        tokens, left = len(query), _left(sizes, window)
        heads = query.shape[1] // head_dim
        padded = 1 << (head_dim - 1).bit_length()
        shape = tokens, heads, padded
        if shape not in parts:
            rows = tokens, heads, NUM_PAR_SOFTMAX_SEGMENTS
            made = ((*rows, padded), rows, rows)
            sums, most, mass = (out.new_empty(each, dtype=torch.float32) for each in made)
            parts[shape] = sums, most, mass
        sums, most, mass = parts[shape]
        factor = q_scale if q_scale.numel() else torch.ones_like(k_scale)
        unified_attention(
            q=query.view(tokens, -1, head_dim),
            k=key_cache,
            v=value_cache,
            out=out.view(tokens, -1, head_dim),
            cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=query.device),
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=block_table.shape[1] * key_cache.shape[1],
            softmax_scale=scale,
            causal=True,
            window_size=(left, 0 if window.numel() else -1),
            block_table=block_table,
            softcap=0,
            q_descale=factor if in_fp8 else None,
            k_descale=k_scale.expand(tokens, kv_heads),
            v_descale=v_scale.expand(tokens, kv_heads),
            seq_threshold_3D=MIN_LAUNCH_GRID_SIZE_2D // kv_heads,
            num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS,
            softmax_segm_output=sums,
            softmax_segm_max=most,
            softmax_segm_expsum=mass,
            sinks=sinks if sinks.numel() else None,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        )

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "vllm-triton": vllm_triton,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
