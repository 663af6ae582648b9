"""Attention of decode steps over a cache in fp8, in the real vLLM's layers, on the CPU.

The layer rounds its query and writes its cache itself, as vLLM's code has it. Doubles stand for the
kernels: FlashAttention's in `vllm_decode`, that of the write in `vllm_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_attention import BLOCK, HEAD_DIM, HEADS, KV_HEADS, attention, empty_cache
from vllm_decode import CPU as PLAIN_CPU
from vllm_decode import metadata, put_double
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher import bench
from patcher.bench.runner.loading import load
from patcher.integrate.vllm.points import POINTS

__all__ = ("attention", "config")  # fixtures of tests here

pytestmark = needs_vllm

POINT, OP = "decode_attention.fp8", bench.load_op("decode_attention_fp8")
CPU = load(str(OP.folder / "solutions/cpu_torch/decode_attention_fp8.py"), "python", OP.name)
WINDOW = 4
SLOTS = torch.tensor([4, 0, -1])
"""Where the new tokens of the requests of `metadata` go."""
SCALES = {"q": 0.004, "k": 0.006, "v": 0.003}
"""A few numbers are beyond 448 times theirs."""


def filled(layer: Any) -> Any:
    """The layer, with scales and a cache that vLLM's code wrote."""
    layer.impl.vllm_flash_attn_version = 3
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 2 * BLOCK, KV_HEADS, HEAD_DIM, generator=generator)
    for name, scale in SCALES.items():
        getattr(layer, f"_{name}_scale").fill_(scale)
    layer.kv_cache = empty_cache(layer)
    slots = torch.arange(2 * BLOCK)
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    return layer


@pytest.fixture
def served(attention: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer with vLLM's own forward and a cache in fp8."""
    put_double(monkeypatch, attention.forward)
    return filled(attention("llama", cache_dtype="fp8").attn)


@pytest.fixture
def kernel() -> Iterator[Any]:
    guards = guards_of(OP.name)
    common = {"T": torch.float32, "C": torch.float8_e4m3fn, "F": torch.float32, "I": torch.int32}
    queries = (torch.float32, torch.float8_e4m3fn)
    made = dispatcher(
        OP.name, CPU, replace(guards, dtypes=tuple({**common, "Q": query} for query in queries))
    )
    yield made
    made.close()


@pytest.fixture
def patched(served: Any, kernel: Any) -> Iterator[Any]:
    """The dispatcher, in."""
    point = POINTS[POINT]()
    point.install(kernel)
    yield kernel
    point.remove()


def run(config: Any, layer: Any, step: Any, slots: torch.Tensor = SLOTS) -> torch.Tensor:
    """vLLM's whole layer: the query's rounding, the write and attention."""
    from vllm.forward_context import set_forward_context

    generator = torch.Generator().manual_seed(4)
    query = torch.randn(len(slots), HEADS * HEAD_DIM, generator=generator)
    key, value = torch.randn(2, len(slots), KV_HEADS * HEAD_DIM, generator=generator)
    name = layer.layer_name
    with set_forward_context({name: step}, config, slot_mapping={name: slots}):
        found: torch.Tensor = layer(query, key, value)
    return found.clone()


def calls(kernel: Any) -> int:
    return sum(kernel.book.calls.values())


@feature("FP8 KV cache", "right", POINT)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_decode_step_is_the_kernels(
    window: int | None, sinks: bool, config: Any, served: Any, kernel: Any
) -> None:
    if window is not None:
        served.impl.sliding_window = (window - 1, 0)
    if sinks:
        served.impl.sinks = torch.nn.Parameter(torch.linspace(-1, 1, HEADS))
    step = metadata()
    expected, written = run(config, served, step), served.kv_cache.clone()
    assert expected[:2].abs().amax() > 0.1
    point = POINTS[POINT]()
    for turn in (1, 2):  # in, out, and in again
        point.install(kernel)
        assert torch.allclose(run(config, served, step), expected, atol=1e-6)
        assert calls(kernel) == turn
        point.remove()
        assert run(config, served, step).equal(expected)
    assert served.kv_cache.equal(written)
    assert calls(kernel) == 2
    assert not kernel.book.reasons
    [case] = kernel.book.calls
    assert "float8_e4m3fn" in case


@feature("sliding windows, sinks, padded graphs", "right", POINT)
def test_tokens_beyond_the_steps_are_none(config: Any, served: Any, patched: Any) -> None:
    padded = torch.tensor([*SLOTS.tolist(), -1, -1])
    step = metadata()
    assert run(config, served, step, padded)[2].eq(0).all(), "a request without tokens"
    served.impl.forward(
        served,
        torch.ones(5, HEADS, HEAD_DIM).to(torch.float8_e4m3fn),
        *torch.ones(2, 5, KV_HEADS, HEAD_DIM),
        served.kv_cache,
        step,
        out := torch.full((5, HEADS, HEAD_DIM), 7.0),
    )
    assert out[2].eq(0).all()
    assert out[3:].eq(7).all()
    assert calls(patched) == 2


@feature("`VLLM_KV_CACHE_LAYOUT`, packed caches", "right", POINT)
def test_heads_may_lie_before_tokens(config: Any, served: Any, patched: Any) -> None:
    expected, cache = run(config, served, metadata()), served.kv_cache
    strides = cache.stride()
    if cache.dim() == 5:
        served.kv_cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        served.kv_cache = cache.contiguous()
    assert served.kv_cache.stride() != strides
    assert run(config, served, metadata()).equal(expected)
    assert calls(patched) == 2


def test_a_query_that_the_engine_leaves_as_it_is_has_no_scale(
    config: Any, served: Any, kernel: Any
) -> None:
    step = metadata()
    rounded = run(config, served, step)
    # as FlashAttention 4 on Hopper, and as platforms without its kernel
    served.query_quant, served.impl.supports_quant_query_input = None, False
    expected = run(config, served, step)
    assert not torch.allclose(expected, rounded, atol=1e-3)
    point = POINTS[POINT]()
    point.install(kernel)
    assert torch.allclose(run(config, served, step), expected, atol=1e-6)
    assert calls(kernel) == 1
    point.remove()


def test_scales_count_as_they_are_at_each_call(config: Any, served: Any, patched: Any) -> None:
    before = run(config, served, metadata())
    served._v_scale.mul_(2)
    # all but the new tokens' values, which are written by the new scale
    assert run(config, served, metadata()).abs().mean() > 1.5 * before.abs().mean()
    assert calls(patched) == 2


@pytest.mark.parametrize("name", ["_q_scale", "_k_scale", "_v_scale"])
def test_a_scale_of_each_head_stays_the_engines(
    name: str, config: Any, served: Any, patched: Any
) -> None:
    served.register_buffer(name, torch.tensor([0.004, 0.006]))
    reason = "a KV cache with a scale of each head"
    assert POINTS[POINT]().applies(served) == reason
    served.impl.forward(
        served,
        torch.ones(3, HEADS, HEAD_DIM).to(torch.float8_e4m3fn),
        *torch.ones(2, 3, KV_HEADS, HEAD_DIM),
        served.kv_cache,
        metadata(),
        out := torch.full((3, HEADS, HEAD_DIM), 7.0),
    )
    assert out[:2].ne(7).all()
    assert calls(patched) == 0
    assert dict(patched.book.reasons) == {reason: 1}


@feature("speculative decoding, chunked prefill", "falls back", POINT)
def test_a_step_of_prefill_is_flash_attentions(config: Any, served: Any, kernel: Any) -> None:
    step, slots = metadata((1, 3, 0)), torch.tensor([4, 30, 31, 0])
    expected = run(config, served, step, slots)
    point = POINTS[POINT]()
    point.install(kernel)
    assert run(config, served, step, slots).equal(expected)
    assert dict(kernel.book.reasons) == {"more than one token of a request": 1}
    point.remove()


def test_each_layer_goes_to_the_point_of_its_cache(
    config: Any, attention: Any, served: Any, kernel: Any
) -> None:
    plain = filled(attention("llama", "model.layers.1.self_attn").attn)
    guards = guards_of("decode_attention", T=torch.float32, I=torch.int32)
    other = dispatcher("decode_attention", PLAIN_CPU, guards)
    expected = [run(config, layer, metadata()) for layer in (served, plain)]
    kernels = {POINT: kernel, "decode_attention": other}
    for order in (list(kernels), list(kernels)[::-1]):
        points = [POINTS[name]() for name in order]
        for name, point in zip(order, points, strict=True):
            point.install(kernels[name])
        for layer, right in zip((served, plain), expected, strict=True):
            assert torch.allclose(run(config, layer, metadata()), right, atol=1e-6)
        points[0].remove()
        for layer, right in zip((served, plain), expected, strict=True):
            assert torch.allclose(run(config, layer, metadata()), right, atol=1e-6)
        points[1].remove()
    # alone, each is called in the place of the other's layers, and says why not
    assert (calls(kernel), calls(other)) == (3, 3)
    assert dict(kernel.book.reasons) == {"KV cache of auto": 1}
    assert dict(other.book.reasons) == {"KV cache of fp8": 1}
    other.close()


def test_layers_say_why_they_stay(attention: Any, served: Any) -> None:
    point = POINTS[POINT]()
    assert point.of_role(served)
    assert point.applies(served) is None
    plain = attention("llama", "model.layers.1.self_attn").attn
    assert point.applies(plain) == "KV cache of auto"
    served.kv_cache_dtype = "fp8_e5m2"
    assert point.applies(served) == "KV cache of fp8_e5m2"
    served.kv_cache_dtype = "fp8_e4m3"
    assert point.applies(served) is None
    served.calculate_kv_scales = True  # until 0.26.0: the layer measures them before attention
    assert point.applies(served) is None
    served.impl.logits_soft_cap = 30.0
    assert point.applies(served) == "scores with a slope or a cap"

    class TritonAttentionImpl:
        pass

    served.impl = TritonAttentionImpl()
    assert point.applies(served) == "attention by TritonAttentionImpl"


def test_a_measuring_run_has_no_cache(config: Any, served: Any, patched: Any) -> None:
    assert run(config, served, None).eq(0).all()
    assert dict(patched.book.reasons) == {"no KV cache yet": 1}
