"""Attention of decode steps in the real vLLM's FlashAttention layers, on the CPU.

A double stands for FlashAttention's kernel: see `vllm_decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_attention import BLOCK, HEAD_DIM, HEADS, KV_HEADS, attention, empty_cache
from vllm_decode import CPU, OP, metadata, put_double
from vllm_gpu import flash
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher.bench import VerificationError
from patcher.bench.judge.call_recording import read_recording
from patcher.bench.judge.contract_observation import observe
from patcher.integrate.recorders import recorder
from patcher.integrate.vllm import engine
from patcher.integrate.vllm.points import POINTS

__all__ = ("attention", "config")  # fixtures of tests here

pytestmark = needs_vllm

WINDOW = 4
POINT = "decode_attention"
BOTH = POINT, "decode_attention.fp8"


@pytest.fixture
def served(attention: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An attention layer with vLLM's own forward and a cache that is filled."""
    put_double(monkeypatch, attention.forward)
    layer = attention("llama").attn
    layer.impl.vllm_flash_attn_version = 3
    generator = torch.Generator().manual_seed(3)
    cache = empty_cache(layer)
    layer.kv_cache = cache.copy_(torch.randn(cache.shape, generator=generator))
    return layer


@pytest.fixture
def kernel() -> Iterator[Any]:
    guards = guards_of("decode_attention", T=torch.float32, I=torch.int32)
    return dispatcher("decode_attention", CPU, guards)


@pytest.fixture
def patched(served: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The dispatcher, in."""
    point = POINTS["decode_attention"]()
    point.install(kernel)
    yield kernel
    point.remove()
    kernel.close()


def run(layer: Any, step: Any, tokens: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator)
    out = torch.full((tokens, HEADS, HEAD_DIM), 7.0)
    layer.impl.forward(layer, query, key, value, layer.kv_cache, step, out)
    return out


def calls(kernel: Any) -> int:
    return sum(kernel.book.calls.values())


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_decode_step_is_the_kernels(
    window: int | None, sinks: bool, served: Any, kernel: Any
) -> None:
    if window is not None:
        served.impl.sliding_window = (window - 1, 0)
    if sinks:
        served.impl.sinks = torch.nn.Parameter(torch.linspace(-1, 1, HEADS))
    step = metadata()
    expected = run(served, step)
    point = POINTS["decode_attention"]()
    for turn in (1, 2):  # in, out, and in again
        point.install(kernel)
        assert torch.allclose(run(served, step), expected, atol=1e-6)
        assert calls(kernel) == turn
        point.remove()
        assert run(served, step).equal(expected)
    assert calls(kernel) == 2
    assert not kernel.book.reasons
    kernel.close()


@feature("sliding windows, sinks, padded graphs", "right", POINT)
def test_padding_is_left_as_it_was_beyond_the_steps_tokens(served: Any, patched: Any) -> None:
    found = run(served, metadata(), tokens=5)
    assert found[2].eq(0).all(), "a request without tokens"
    assert found[3:].eq(7).all()
    assert calls(patched) == 1


def test_what_flash_attention_gives_confirms_the_contract_or_refutes_it(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The closed kernel is known by what it was given and gave alone."""
    from vllm.v1.attention.backends import flash_attn

    file = tmp_path / "calls.safetensors"
    served.impl.sliding_window = (WINDOW - 1, 0)
    expected = run(served, metadata())
    with recorder("vllm", POINT, file) as found:
        assert run(served, metadata()).equal(expected)
        run(served, metadata((1, 3, 1)), 5)
    assert (found.seen, len(found.calls)) == (1, 1), "what is no step of decode is no call"
    _, [call] = read_recording(file, OP.contract)
    assert call.inputs["key_cache"].equal(engine.kv_caches(served.kv_cache, HEAD_DIM)[0])
    assert call.outputs["out"].equal(expected.flatten(1))
    [group] = observe(file).groups
    assert group.finding == "confirmed", group.problem

    def without_window(**given: Any) -> None:
        flash(**{**given, "window_size": (-1, -1)})

    for name in ("flash_attn_varlen_func", "_FA4_DENSE_ATTENTION_KERNEL"):
        if hasattr(flash_attn, name):
            monkeypatch.setattr(flash_attn, name, without_window)
    with recorder("vllm", POINT, file):
        run(served, metadata())
    [group] = observe(file).groups
    assert group.finding == "refuted"


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        pytest.param(
            {"queries": (1, 3, 1)},
            "more than one token of a request",
            marks=feature("speculative decoding, chunked prefill", "falls back", POINT),
        ),
        ({"causal": False}, "another kind of mask"),
        ({"rswa_prefix_lens": torch.ones(3)}, "a mask of its own"),
    ],
)
def test_other_steps_are_flash_attentions(
    step: dict[str, Any], reason: str, served: Any, patched: Any
) -> None:
    step = metadata(**step)
    tokens = step.num_actual_tokens
    found = run(served, step, tokens)
    assert calls(patched) == 0
    [(told, count)] = patched.book.reasons.items()
    assert reason in told
    assert count == 1
    assert found[:2].ne(7).all()


def test_a_measuring_run_has_no_cache(served: Any, patched: Any) -> None:
    assert run(served, None).eq(0).all()
    assert dict(patched.book.reasons) == {"no KV cache yet": 1}


@feature("FP8 KV cache", "falls back", POINT)
def test_layers_say_why_they_stay(served: Any) -> None:
    point = POINTS["decode_attention"]()
    assert point.of_role(served)
    assert point.applies(served) is None
    served.impl.logits_soft_cap = 30.0
    assert point.applies(served) == "scores with a slope or a cap"
    served.impl.logits_soft_cap, served.impl.sliding_window = 0, (3, 3)
    assert point.applies(served) == "a window to both sides"
    served.kv_cache_dtype = "fp8"
    assert point.applies(served) == "KV cache of fp8"


@feature("`cudagraph_mode` FULL", "refused", *BOTH)
def test_graphs_of_mixed_steps_are_refused(
    config: Any, served: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode

    for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        monkeypatch.setattr(config.compilation_config, "cudagraph_mode", mode)
        assert not engine.records_mixed_steps()
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL)
    for name in BOTH:
        with pytest.raises(VerificationError, match="mixed steps"):
            POINTS[name]().install(kernel)
    kernel.close()


@feature("`VLLM_KV_CACHE_LAYOUT`, packed caches", "right", POINT)
def test_the_cache_is_a_view_of_the_engines(served: Any) -> None:
    keys, values = engine.kv_caches(served.kv_cache, HEAD_DIM) or ((), ())
    assert keys.shape == values.shape == (2, BLOCK, KV_HEADS, HEAD_DIM)
    assert keys.untyped_storage().data_ptr() == served.kv_cache.untyped_storage().data_ptr()
