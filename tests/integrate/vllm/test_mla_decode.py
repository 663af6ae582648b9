"""Latent attention of decode steps: vLLM's own classes, a double for the kernel of each backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, needs_vllm, patched, shipped

from patcher.bench import VerificationError
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder
from patcher.integrate.survey import survey
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT = "mla_decode"
LATENT, ROPE, HEADS, BLOCK, SCALE = 32, 16, 3, 4, 0.25
LENGTHS = (5, 11, 0)
BACKENDS = {
    "flashattn_mla": "FlashAttnMLAImpl",
    "flashmla": "FlashMLAImpl",
    "triton_mla": "TritonMLAImpl",
}
FOLDER = "vllm.v1.attention.backends.mla"


class Gpu:
    """In the place of the backends' kernels, in their own protocols."""

    def __init__(self) -> None:
        self.rows: int = 0
        """Of the calls so far."""

    def attend(self, query: Any, cache: Any, table: Any, lengths: Any) -> torch.Tensor:
        self.rows += len(query)
        each, found = len(query) // len(lengths), torch.zeros(len(query), HEADS, LATENT)
        for row in range(len(query)):
            end = int(lengths[row // each]) - (each - 1 - row % each)
            places = torch.arange(max(end, 0))
            known = cache[table[row // each].long()[places // BLOCK], places % BLOCK]
            if end > 0:
                found[row] = (query[row] @ known.T * SCALE).softmax(1) @ known[:, :LATENT]
        return found

    def flashattn_mla(self, q: Any, k: Any, v: Any, q_v: Any, **more: Any) -> torch.Tensor:
        assert more["softmax_scale"] == SCALE
        cache = torch.cat([v, k], 3).squeeze(2)
        return self.attend(torch.cat([q_v, q], 2), cache, more["block_table"], more["seqused_k"])

    def flashmla(self, q: Any, k_cache: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert more["softmax_scale"] == SCALE
        cache = k_cache.squeeze(2)
        rows = self.attend(q.flatten(0, 1), cache, more["block_table"], more["cache_seqlens"])
        return rows.view(*q.shape[:3], LATENT), torch.zeros(len(q), HEADS, q.shape[1])

    def triton_mla(self, q: Any, cache: Any, _: Any, out: Any, *rest: Any, **more: Any) -> None:
        out.copy_(self.attend(q, cache.squeeze(2), *rest[1:3]))


@pytest.fixture
def gpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    kernels = "flash_attn_varlen_func", "flash_mla_with_kvcache", "decode_attention_fwd"
    for backend, name in zip(BACKENDS, kernels, strict=True):
        module = sources.module(f"{FOLDER}.{backend}")
        monkeypatch.setattr(module, name, getattr(made, backend), raising=False)
        monkeypatch.setattr(module, f"{name}_fp8", getattr(made, backend), raising=False)
        monkeypatch.setattr(module, "_compute_num_kv_splits", lambda *_: 1, raising=False)
    return made


def layer_of(backend: str = "flashmla", **settings: Any) -> Any:
    """A layer whose attention is what a backend's forward reads."""
    layers = sources.module("vllm.model_executor.layers.attention.mla_attention")
    kind = sources.part(f"{FOLDER}.{backend}:{BACKENDS[backend]}")
    impl = kind.__new__(kind)
    given: dict[str, Any] = {
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "scale": SCALE,
        "dcp_rank": 0,
    }
    given |= {"kv_cache_dtype": "auto", "dcp_world_size": 1, "_sm_count": 1, "num_heads": HEADS}
    vars(impl).update({"need_to_return_lse_for_decode": False, **given, **settings})
    layer = layers.MLAAttention.__new__(layers.MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.impl, layer._k_scale, layer._q_scale = impl, torch.ones(()), torch.ones(())
    return layer


def run(layer: Any, tokens: int = 3, joined: bool = False) -> torch.Tensor:
    seed = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, HEADS, LATENT + ROPE, generator=seed)
    cache = torch.randn(8, BLOCK, LATENT + ROPE, generator=seed)
    decode = SimpleNamespace(
        block_table=torch.tensor([[1, 2, 0], [3, 4, 5], [0, 0, 0]], dtype=torch.int32),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        query_start_loc=torch.arange(0, tokens + 1, tokens // 3, dtype=torch.int32),
        scheduler_metadata=SimpleNamespace(tile_scheduler_metadata=None, num_splits=None),
        **{"max_query_len": tokens // 3, "max_seq_len": 11, "max_num_splits": 0},
        dcp_tot_seq_lens=None,
    )
    step = SimpleNamespace(decode=decode, num_decodes=3, max_seq_len=11, causal=True)
    given = q if joined else (q[..., :LATENT], q[..., LATENT:])
    result: torch.Tensor = layer.impl.forward_mqa(given, cache, step, layer)[0]
    return result.view(tokens, HEADS, LATENT)


@feature("`enforce_eager`, mode NONE", "right", POINT)
@feature("speculative decoding, chunked prefill", "falls back", POINT)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_decode_run_the_kernel_and_rows_of_speculation_the_engines_own(
    gpu: Gpu, backend: str, joined: bool
) -> None:
    layer = layer_of(backend)
    single, double = run(layer, 3, joined), None
    if backend == "flashmla":  # the other two know of several rows by other tables
        double = run(layer, 6, joined)
    kernel = shipped(POINT, ("scale", float), T=torch.float32, I=torch.int32)
    before = gpu.rows
    with patched(POINT, kernel) as point:
        assert survey(point, kernel.guards, [layer, torch.nn.Linear(2, 2)]).taken == 1
        for _ in range(2):
            given = run(layer, 3, joined)
            torch.testing.assert_close(given, single)
            assert not given[2].any()
        assert gpu.rows == before
        assert sum(kernel.book.calls.values()) == 2
        if double is not None:
            assert torch.equal(run(layer, 6, joined), double)
            assert gpu.rows == before + 6
            assert dict(kernel.book.fallbacks) == {"more than one token of a request": 1}
    assert torch.equal(run(layer, 3, joined), single)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_each_backend_gives_confirms_the_contract(
    gpu: Gpu, backend: str, tmp_path: Path
) -> None:
    layer, file = layer_of(backend), tmp_path / "calls.safetensors"
    own = run(layer)
    with recorder("vllm", POINT, file) as found:
        assert torch.equal(run(layer), own)
    assert (found.seen, found.record().left_out) == (1, {})
    [group] = observe(file).groups
    assert group.finding == "confirmed", group.problem


@feature("FP8 KV cache", "falls back", POINT)
@feature("decode context parallelism", "falls back", POINT)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "KV cache of fp8"),
        ({"dcp_world_size": 2}, "decode context parallelism"),
        ({"need_to_return_lse_for_decode": True}, "decode context parallelism"),
    ],
)
def test_other_attention_has_a_reason_and_stays_with_the_engine(
    gpu: Gpu, settings: dict[str, Any], reason: str
) -> None:
    layer = layer_of(**settings)
    own, kernel = run(layer), shipped(POINT, ("scale", float), T=torch.float32, I=torch.int32)
    with patched(POINT, kernel) as point:
        assert dict(survey(point, kernel.guards, [layer]).refused) == {reason: 1}
        assert torch.equal(run(layer), own)
        assert dict(kernel.book.fallbacks) == {reason: 1}
        layer.impl = SimpleNamespace()
        assert point.applies(layer) == "attention by SimpleNamespace"


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
@feature("`cudagraph_mode` FULL", "refused", POINT)
def test_batch_invariance_and_graphs_of_mixed_steps_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "records_mixed_steps", lambda: True)
    with pytest.raises(VerificationError, match="one graph for decode and for mixed steps"):
        POINTS[POINT]().find()
    monkeypatch.setattr(engine, "batch_invariant", lambda: True)
    with pytest.raises(VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[POINT]().find()
