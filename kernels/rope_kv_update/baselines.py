"""Baselines: vLLM's two kernels, flashinfer's rotation with vLLM's write, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. All write in place. The engines' kernels also
rotate the key in place, which saves a buffer; a candidate may not do that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[..., Any]


def _rotated(
    positions: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [each.float() for each in (query, key, value)]
    if bias.numel():
        added = bias.float().split([each.shape[1] for each in parts])
        parts = [part + each for part, each in zip(parts, added, strict=True)]
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, -1)
    for index in (0, 1):
        first, second = parts[index].view(len(query), -1, cos_sin.shape[1]).chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        parts[index] = turned.view(parts[index].shape)
    return parts[0].to(query.dtype), parts[1].to(query.dtype), parts[2].to(query.dtype)


def _write(
    key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    # padding repeats another token's write, since the host would wait for the size of a mask;
    # if all slots are padding, the last place is written with its own contents
    blocks, block_size = key_cache.shape[:2]
    best = slots.argmax()
    source = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), best)
    target = slots[source] % (blocks * block_size)
    block, offset = target // block_size, target % block_size
    some = (slots.max() >= 0).view(1, 1, 1)  # the host would wait for a 0-d index
    for cache, new in ((key_cache, key), (value_cache, value)):
        old = cache[block, offset]  # a Python number as index would be copied from the host
        cache[block, offset] = torch.where(some, new.view(old.shape)[source], old)


def _with(rotate: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Baseline:
    def run(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> None:
        turned, keys, values = rotate(positions, query, key, value, bias, cos_sin)
        query.copy_(turned)
        _write(keys, values, slots, key_cache, value_cache)

    return run


def eager(device: str) -> Baseline:
    return _with(_rotated)


def compiled(device: str) -> Baseline:
    # only the rotation, as engines compile it; Inductor refuses to write to views of one buffer
    return _with(torch.compile(_rotated, dynamic=True))


def _vllm_write(device: str) -> Callable[..., None]:
    """vLLM 0.25.1, v1/attention/backends/flash_attn.py, do_kv_cache_update."""
    if device != "cuda":
        raise ImportError("vLLM's kernel needs a CUDA device")
    import vllm._custom_ops as ops

    one = torch.ones((), dtype=torch.float32, device=device)

    def write(
        key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> None:
        heads, head_dim = key_cache.shape[2:]
        ops.reshape_and_cache_flash(
            key.view(-1, heads, head_dim),
            value.view(-1, heads, head_dim),
            key_cache,
            value_cache,
            slots,
            "auto",
            one,
            one,
        )

    return write


def vllm(device: str) -> Baseline:
    write = _vllm_write(device)
    import vllm._custom_ops as ops

    def run(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> None:
        if bias.numel():
            raise ImportError("vLLM adds the bias in its matmul")
        if cos_sin.dtype != query.dtype:
            raise ImportError("vLLM's kernel wants the table in the dtype of the query")
        ops.rotary_embedding(positions, query, key, key_cache.shape[-1], cos_sin, True)
        write(key, value, slots, key_cache, value_cache)

    return run


def flashinfer(device: str) -> Baseline:
    write = _vllm_write(device)  # flashinfer's own write takes page tables, not slots
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    def run(
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> None:
        if bias.numel():
            raise ImportError("flashinfer's rotation adds no bias")
        if cos_sin.dtype is not torch.float32:
            raise ImportError("flashinfer's kernel wants the table in float32")
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, key_cache.shape[-1], cos_sin)
        write(key, value, slots, key_cache, value_cache)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "vllm": vllm,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
