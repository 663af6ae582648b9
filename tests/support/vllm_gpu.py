"""Doubles of what a GPU has, under which whole models of vLLM run a decode step on a CPU.

The platform answers as one with FlashAttention, Triton's kernels for latent attention and for
experts, and nothing else. Each kernel is replaced by PyTorch that speaks its protocol. Nothing of a
model, of its layers or of what chooses between them is replaced.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from vllm_attention import write

from patcher.integrate.vllm import sources

_BACKENDS = "vllm.v1.attention.backends"
_MOE = "vllm.model_executor.layers.fused_moe"
_MAMBA = "vllm.model_executor.layers.mamba"


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Put the doubles in, as long as `patch` lasts."""
    _platform(patch)
    _flash_attention(patch)
    _latent_attention(patch)
    _experts(patch)
    _mamba2(patch)
    _gated_delta(patch)
    _awq(patch)


def _platform(patch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    def backend(cls: Any, chosen: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        latent = attn_selector_config.use_mla
        kind = "mla.triton_mla.TritonMLABackend" if latent else "flash_attn.FlashAttentionBackend"
        return f"{_BACKENDS}.{kind}"

    answers: dict[str, Any] = {
        "get_attn_backend_cls": backend,
        "opaque_attention_op": lambda cls: True,
        "num_compute_units": lambda cls, *device: 1,
        "current_device": lambda cls: "cpu",
    }
    patch.setattr(sources.module("vllm.utils.torch_utils"), "PIN_MEMORY", False, raising=False)
    for name, answer in answers.items():
        patch.setattr(type(current_platform), name, classmethod(answer), raising=False)


def flash(**given: Any) -> None:
    """FlashAttention with paged keys: each request's last queries attend to what is before."""
    out, starts = given["out"], given["cu_seqlens_q"].tolist()
    block, groups = given["k"].shape[1], given["q"].shape[1] // given["k"].shape[2]
    left = (given["window_size"] or (-1, -1))[0]
    for request, length in enumerate(given["seqused_k"].tolist()):
        query, *cached = (_numbers(given, name, request) for name in "qkv")
        for token in range(starts[request], min(starts[request + 1], len(query))):
            end = length - (starts[request + 1] - 1 - token)
            places = torch.arange(0 if left == -1 else max(end - 1 - left, 0), max(end, 0))
            pages = given["block_table"][request].long()[places // block]
            keys, values = (
                each[pages, places % block].repeat_interleave(groups, 1) for each in cached
            )
            scores = torch.einsum("hd,shd->hs", query[token], keys)
            scores = scores * given["softmax_scale"]
            if cap := given["softcap"]:
                scores = cap * (scores / cap).tanh()
            if given["s_aux"] is not None:
                scores = torch.cat([scores, given["s_aux"].to(scores)[:, None]], 1)
            weights = scores.softmax(1)[:, : len(places)]
            out[token] = torch.einsum("hs,shd->hd", weights, values)


def _numbers(given: dict[str, Any], name: str, request: int) -> torch.Tensor:
    """The numbers of q, k or v: in fp8 times the request's scale of each key head."""
    found: torch.Tensor = given[name]
    descale = given.get(f"{name}_descale")
    if found.dtype != torch.float8_e4m3fn or descale is None:
        return found.float()
    scales = descale[request].repeat_interleave(found.shape[-2] // given["k"].shape[2])
    return found.float() * scales.unsqueeze(-1)


def _flash_attention(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import flash_attn

    answers: dict[str, Any] = {
        "flash_attn_varlen_func": flash,
        "reshape_and_cache_flash": write,
        "get_flash_attn_version": lambda *_, **__: 3,
        "flash_attn_supports_sinks": lambda: True,
        "get_scheduler_metadata": lambda **_: None,
    }
    for name, answer in answers.items():
        patch.setattr(flash_attn, name, answer, raising=False)


def _latent_attention(patch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops
    from vllm.v1.attention.backends import fa_utils

    def cached(latent: Any, rope: Any, cache: Any, slots: Any, *rest: Any, **more: Any) -> None:
        cache.view(-1, cache.shape[-1])[slots] = torch.cat([latent, rope.view(len(rope), -1)], 1)

    def attend(q: Any, cache: Any, _: Any, out: Any, *rest: Any, **more: Any) -> None:
        table, lengths = rest[1:3]
        rows, latent, block = cache.squeeze(2), out.shape[-1], cache.shape[1]
        scale = next(each for each in (*rest, *more.values()) if isinstance(each, float))
        for row, length in enumerate(lengths.tolist()):
            places = torch.arange(length)
            known = rows[table[row].long()[places // block], places % block].float()
            out[row] = (q[row].float() @ known.T * scale).softmax(1) @ known[:, :latent]

    # what a model's prefill would run; it is imported where a layer is built
    for name in ("flash_attn_varlen_func", "compile_flash_attn_varlen_func_from_specs"):
        patch.setattr(fa_utils, name, flash, raising=False)
    patch.setattr(fa_utils, "is_flash_attn_varlen_func_available", lambda: True)
    home = sources.module(f"{_BACKENDS}.mla.triton_mla")
    patch.setattr(home, "decode_attention_fwd", attend)
    patch.setattr(home, "_compute_num_kv_splits", lambda *_: 1, raising=False)
    patch.setattr(_custom_ops, "concat_and_cache_mla", cached)


def routed(weights: Any, ids: Any, _: Any, logits: Any, renormalise: bool, **more: Any) -> None:
    """vLLM's C kernel of the softmax and choice of experts."""
    scores = logits.float().softmax(1)
    order = scores.sort(dim=1, descending=True, stable=True)
    picked = order.values[:, : weights.shape[1]]
    weights.copy_(picked / picked.sum(1, keepdim=True) if renormalise else picked)
    ids.copy_(order.indices[:, : weights.shape[1]])
    if (padding := more.get("is_padding")) is not None:
        ids.masked_fill_(padding.unsqueeze(1), -1)


def _silu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def _swiglu_oai(both: torch.Tensor) -> torch.Tensor:
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


_ACTIVATIONS = {"silu": _silu, "swigluoai": _swiglu_oai}
"""Of experts, by vLLM's names."""


def _biased(rows: torch.Tensor, bias: Any, experts: torch.Tensor) -> torch.Tensor:
    return rows if bias is None else rows + bias[experts].to(rows)


def _experts(patch: pytest.MonkeyPatch) -> None:
    """Of Triton, in bfloat16 and float32: two matmuls and a sum by the weights of the router."""
    from vllm import _custom_ops

    oracle = sources.module(f"{_MOE}.oracle.unquantized")
    experts = sources.part(f"{_MOE}.experts.triton_moe:TritonExperts")

    def apply(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        **more: Any,
    ) -> None:
        if self.quant_config.use_fp8_w8a8:
            given = (output, hidden_states, w1, w2, topk_weights, topk_ids, activation)
            original(self, *given, **more)
            return
        for token, (ids, scale) in enumerate(zip(topk_ids.long(), topk_weights, strict=True)):
            first = _biased(w1[ids] @ hidden_states[token], self.w1_bias, ids)
            inner = _ACTIVATIONS[activation.value](first)
            second = torch.einsum("ehi,ei->eh", w2[ids], inner)
            output[token] = scale.to(second) @ _biased(second, self.w2_bias, ids)

    original = experts.apply
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace = sources.module("vllm.v1.worker.workspace")
    patch.setattr(workspace, "_manager", None)
    workspace.init_workspace_manager(torch.device("cpu"))
    patch.setattr(_custom_ops, "topk_softmax", routed)
    patch.setattr(
        oracle, "_get_priority_backends", lambda *_: [oracle.UnquantizedMoeBackend.TRITON]
    )
    patch.setattr(experts, "_supports_current_device", staticmethod(lambda: True))
    patch.setattr(experts, "apply", apply)


def convolved(
    x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None, **more: Any
) -> torch.Tensor:
    """The step of a causal convolution, which shifts its state; of one token of each request."""
    slots = more["conv_state_indices"].long().view(len(x), -1)[:, 0]
    window = torch.cat([state[slots], x.unsqueeze(-1).to(state.dtype)], 2)
    state[slots] = window[:, :, 1:]
    found = (window * weight).sum(2)
    found = found if bias is None else found + bias
    return (torch.nn.functional.silu(found) if activation in ("silu", "swish") else found).to(x)


def scanned(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, **how: Any) -> None:
    """Triton's step of Mamba2: a token after another, from slots to slots."""
    read, written = how["state_batch_indices"], how["dst_state_batch_indices"]
    written = read if written is None else written
    assert how["dt_softplus"]
    assert how["z"] is None
    groups = x.shape[1] // B.shape[1]
    for token in range(len(x)):
        slot, to = (int(each.view(len(each), -1)[token, 0]) for each in (read, written))
        step = torch.nn.functional.softplus(dt[token] + how["dt_bias"]).unsqueeze(-1)
        b, c = (each[token].repeat_interleave(groups, 0) for each in (B, C))
        empty = slot == how["null_block_id"]
        before = torch.zeros_like(state[slot]) if empty else state[slot]
        after = before * (A * step).exp() + step * b[:, None] * x[token].unsqueeze(-1)
        if not empty:
            state[to] = after
        how["out"][token] = (after * c[:, None]).sum(-1) + D * x[token]


def _mamba2(patch: pytest.MonkeyPatch) -> None:
    from vllm.config import MambaConfig

    dispatch = sources.module(f"{_MAMBA}.ops.ssu_dispatch")
    backend = dispatch.TritonSSUBackend(MambaConfig())
    backend._kernel = scanned
    patch.setattr(dispatch, "_mamba_ssu_backend", backend)
    patch.setattr(sources.module(f"{_MAMBA}.mamba_mixer2"), "causal_conv1d_update", convolved)


def _gated_delta(patch: pytest.MonkeyPatch) -> None:
    module = sources.module(f"{_MAMBA}.gdn.qwen_gdn_linear_attn")
    patch.setattr(module, "causal_conv1d_update", convolved)
    function = module.fused_recurrent_gated_delta_rule_packed_decode
    home = sys.modules[function.__module__]
    patch.setattr(home, f"{function.__name__}_kernel", DeltaKernel())
    for name, result in (("next_power_of_2", 16), ("cdiv", 1)):
        patch.setattr(home.triton, name, lambda *_, it=result: it, raising=False)


class DeltaKernel:
    """In the place of Triton's kernel of the gated delta rule: a head of a token after another."""

    def __getitem__(self, grid: Any) -> Any:
        return self._run

    def _run(self, mixed_qkv: Any, a: Any, b: Any, h0: Any, ht: Any, o: Any, **given: Any) -> None:
        heads, values, size = given["H"], given["HV"], given["K"]
        for token, slot in enumerate(given["ssm_state_indices"].tolist()):
            for head in range(values):
                if slot <= 0:
                    o[token, 0, head] = 0
                    continue
                row, group = mixed_qkv[token].float(), head // (values // heads)
                q, k = (row[(at + group) * size :][:size] for at in (0, heads))
                v = row[2 * heads * size + head * given["V"] :][: given["V"]]
                q, k = (each / (each.square().sum() + 1e-6).sqrt() for each in (q, k))
                step = torch.nn.functional.softplus(a[token, head] + given["dt_bias"][head])
                state = h0[slot, head] * (-given["A_log"][head].exp() * step).exp()
                change = (v - state @ k) * b[token, head].sigmoid()
                ht[slot, head] = state + change[:, None] * k
                o[token, 0, head] = ht[slot, head] @ (q * given["scale"])


AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the columns of a word of AWQ are in it, four bits each."""


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """[..., columns / 8] as AWQ packs it, as integers [..., columns]."""
    return ((words.unsqueeze(-1) >> 4 * torch.tensor(AWQ_ORDER)) & 15).flatten(-2)


def awq_matrix(qweight: Any, scales: Any, qzeros: Any) -> torch.Tensor:
    """[..., inputs, outputs], as AWQ defines it: (code - zero point) * scale."""
    group = qweight.shape[-2] // scales.shape[-2]
    zeros, wide = (
        each.repeat_interleave(group, -2) for each in (awq_codes(qzeros), scales.float())
    )
    return (awq_codes(qweight) - zeros) * wide


def _awq(patch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops

    def gemm(x: Any, qweight: Any, scales: Any, qzeros: Any, *_: Any) -> torch.Tensor:
        result: torch.Tensor = x @ awq_matrix(qweight, scales, qzeros).to(x)
        return result

    patch.setattr(_custom_ops, "awq_gemm", gemm)
