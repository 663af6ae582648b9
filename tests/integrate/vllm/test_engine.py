"""What differs between versions of vLLM, asked of the one that is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_here import config, needs_vllm

from patcher.integrate.vllm import engine

__all__ = ("config",)  # a fixture of tests here

BLOCKS, BLOCK, HEADS, HEAD_DIM = 5, 4, 3, 8


def unpacked() -> torch.Tensor:
    """[blocks, 2, block_size, kv_heads, head_dim]"""
    return torch.zeros(BLOCKS, 2, BLOCK, HEADS, HEAD_DIM)


def packed() -> torch.Tensor:
    """[blocks, kv_heads, block_size, 2 * head_dim], in memory with the heads after the slots"""
    return torch.zeros(BLOCKS, BLOCK, HEADS, 2 * HEAD_DIM).transpose(1, 2)


def heads_first() -> torch.Tensor:
    """The first, in memory with the slots after the heads (VLLM_KV_CACHE_LAYOUT=HND)."""
    return torch.zeros(BLOCKS, 2, HEADS, BLOCK, HEAD_DIM).transpose(2, 3)


@pytest.mark.parametrize("make", [unpacked, packed, heads_first])
def test_key_and_value_cache_are_views_of_the_one(make: Any) -> None:
    cache = make()
    found = engine.kv_caches(cache, HEAD_DIM)
    assert found is not None
    for half, value in zip(found, (1.0, 2.0), strict=True):
        assert half.shape == (BLOCKS, BLOCK, HEADS, HEAD_DIM)
        assert half.stride(-1) == 1
        half.fill_(value)
    assert cache.eq(1).sum() == cache.eq(2).sum() == cache.numel() // 2


def test_a_cache_that_is_not_allocated_or_of_another_kind_is_none() -> None:
    for shape in ((0,), (3, 4, 576), (3, 4, 2, 8), (3, 2, 4, 2, 16), (3, 3, 4, 2, 8)):
        assert engine.kv_caches(torch.zeros(shape), HEAD_DIM) is None


def test_padded_scales_are_narrowed_without_a_copy() -> None:
    data = torch.arange(2 * 12 * 3, dtype=torch.uint8).view(2, 3, 12).mT
    scale = SimpleNamespace(storage=SimpleNamespace(data=data))
    assert engine.scale_rows(scale, 12).equal(data.mT)
    narrow = engine.scale_rows(scale, 10)
    assert narrow.equal(data.mT[..., :10])
    assert (narrow.data_ptr(), narrow.stride()) == (data.data_ptr(), (36, 12, 1))


@needs_vllm
def test_the_views_are_those_that_flash_attention_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import flash_attn

    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        flash_attn,
        "reshape_and_cache_flash",
        lambda key, value, keys, values, *rest: written.append((keys, values)),
        raising=False,
    )
    layer = SimpleNamespace(_k_scale=None, _v_scale=None)
    impl = flash_attn.FlashAttentionImpl.__new__(flash_attn.FlashAttentionImpl)
    impl.attn_type, impl.head_size, impl.kv_cache_dtype = "decoder", HEAD_DIM, "auto"
    for make in (unpacked, packed):
        cache = make()
        try:
            impl.do_kv_cache_update(layer, None, None, cache, None)
        except ValueError:
            continue  # the layout of other versions
        found = engine.kv_caches(cache, HEAD_DIM)
        assert found is not None
        for ours, theirs in zip(found, written[-1], strict=True):
            assert ours.data_ptr() == theirs.data_ptr()
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    assert len(written) == 1


@needs_vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_add_and_norm_without_the_c_kernel_are_the_engines(dtype: torch.dtype, config: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm = RMSNorm(64, eps=1e-5, dtype=dtype)
    norm.weight.data.uniform_(0.5, 2.0)
    x, residual = torch.randn(3, 64, dtype=dtype), torch.randn(3, 64, dtype=dtype)
    expected = norm.forward_native(x.clone(), residual.clone())
    run = engine.engines_add_norm()
    run(x, residual, norm.weight.data, 1e-5)
    assert torch.equal(x, expected[0])
    assert torch.equal(residual, expected[1])
    # half a residual, as sequence parallelism leaves: an error, and nothing past its end
    with pytest.raises(RuntimeError, match="must match"):
        run(x, torch.randn(2, 64, dtype=dtype), norm.weight.data, 1e-5)


@needs_vllm
def test_a_layer_says_whether_it_writes_or_scales_its_cache_otherwise(config: Any) -> None:
    layer = SimpleNamespace()
    assert not engine.calculates_kv_scales(layer)
    assert not engine.bypasses_kv_update(layer)
    layer.calculate_kv_scales = layer.kv_cache_update_bypass = True
    assert engine.calculates_kv_scales(layer)
    assert engine.bypasses_kv_update(layer)


@needs_vllm
def test_a_linear_method_with_another_matmul_is_told(config: Any) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method = UnquantizedLinearMethod()
    assert engine.gemm_of(method) in engine.plain_gemms()
    method._gemm_impl = lambda *args: None
    assert engine.gemm_of(method) not in engine.plain_gemms()
