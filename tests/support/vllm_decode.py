"""A double of FlashAttention's kernel for steps of decode: it speaks its protocol, in PyTorch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from patcher import bench
from patcher.bench.runner.loading import load

OP = bench.load_op("decode_attention")
CPU = load(str(OP.folder / "solutions/cpu_torch/decode_attention.py"), "python", OP.name)
LENGTHS = (5, 17, 0)


def flash(**given: Any) -> None:
    """FlashAttention with paged keys: each request's last queries attend to what is before."""
    query, out, starts = given["q"], given["out"], given["cu_seqlens_q"].tolist()
    left = (given["window_size"] or (-1, -1))[0]
    for request, length in enumerate(given["seqused_k"].tolist()):
        keys, values = (_numbers(given, name, request) for name in "kv")
        for token in range(starts[request], min(starts[request + 1], len(query))):
            end = length - (starts[request + 1] - 1 - token)
            if length == 0:
                out[token] = 0
                continue
            size = 0 if left == -1 else left + 1
            heads = _numbers(given, "q", request)[token : token + 1]
            CPU(
                heads.flatten(1),
                keys,
                values,
                given["block_table"][request : request + 1],
                torch.tensor([end], dtype=torch.int32),
                torch.tensor([size] if size else [], dtype=torch.int32),
                torch.empty(0) if given["s_aux"] is None else given["s_aux"],
                out[token : token + 1].flatten(1),
                given["softmax_scale"],
            )


def _numbers(given: dict[str, Any], name: str, request: int) -> torch.Tensor:
    """The numbers of q, k or v: in fp8 times the request's scale of each key head."""
    found: torch.Tensor = given[name]
    descale = given[f"{name}_descale"]
    if found.dtype != torch.float8_e4m3fn or descale is None:
        return found.float()
    kv_heads = given["k"].shape[2]
    scales = descale[request].repeat_interleave(found.shape[-2] // kv_heads)
    return found.float() * scales.unsqueeze(-1)


def put_double(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    """The double in the place of FlashAttention's kernel, under vLLM's own forward."""
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", forward)
    for name in ("flash_attn_varlen_func", "_FA4_DENSE_ATTENTION_KERNEL"):
        if hasattr(flash_attn, name) or name == "flash_attn_varlen_func":
            monkeypatch.setattr(flash_attn, name, flash, raising=False)


def metadata(queries: tuple[int, ...] = (1, 1, 1), **more: Any) -> Any:
    """FlashAttention's of a step with so many new tokens of each request."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    given = {
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "query_start_loc": starts,
        "max_seq_len": max(LENGTHS),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": torch.tensor([[0, 1], [1, 0], [0, 0]], dtype=torch.int32),
        "slot_mapping": torch.zeros(sum(queries), dtype=torch.int64),
        "use_cascade": False,
        "common_prefix_len": 0,
        **dict.fromkeys(("cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")),
        **more,
    }
    known = {each.name for each in fields(FlashAttentionMetadata)}
    return FlashAttentionMetadata(**{name: each for name, each in given.items() if name in known})
