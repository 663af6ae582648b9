"""Baselines: transformers' own rotation, flashinfer's kernel, torch.compile, eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place, or returns (query,
key) without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor], Any]


def _eager(query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.float().chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return rotated.to(heads.dtype)

    return turned(query), turned(key)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


def transformers(device: str) -> Baseline:
    from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

    def run(query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        if cos_sin.dtype != query.dtype:
            raise ImportError("transformers makes cosines in the dtype of the query")
        found: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *cos_sin.chunk(2, -1))
        return found

    return run


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("flashinfer's kernel needs a CUDA device")
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    def run(query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
        if cos_sin.dtype is not torch.float32:
            raise ImportError("flashinfer's kernel wants the table in float32")
        rows = torch.arange(len(query), device=query.device)
        apply_rope_with_cos_sin_cache_inplace(
            rows, query.flatten(1), key.flatten(1), query.shape[-1], cos_sin
        )

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "transformers": transformers,
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
