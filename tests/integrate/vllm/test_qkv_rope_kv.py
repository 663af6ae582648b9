"""Projection, rotation and KV write in one call, in attention layers of the real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_attention import (
    ATTEND,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    MODELS,
    WRITE,
    Compiled,
    attention,
    rope_guards,
    rope_kernel,
    step,
)
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm.points import POINTS

__all__ = ("attention", "config")  # fixtures of tests here

pytestmark = needs_vllm

POINT = "qkv_rope_kv"
SLOTS = torch.tensor([5, -1, 20])
NORMED = ("gemma3", "qwen3", "qwen3_moe")


def kernel_of_block(  # type: ignore[no-untyped-def]
    x, weight, bias, positions, cos_sin, slots, query, key_cache, value_cache
):
    """The contract of qkv_rope_kv_update in plain PyTorch."""
    row = torch.nn.functional.linear(x, weight, bias if bias.numel() else None)
    rotate: Any = rope_kernel
    cuts = query.shape[1], query.shape[1] + KV_HEADS * HEAD_DIM
    parts = [part.clone() for part in row.tensor_split(cuts, 1)]
    rotate(positions, *parts, x.new_empty(0), cos_sin, slots, key_cache, value_cache)
    query.copy_(parts[0])


def linear_kernel(x, weight, bias, output):  # type: ignore[no-untyped-def]
    output.copy_(torch.nn.functional.linear(x, weight, bias if bias.numel() else None))


def dispatching() -> Dispatcher:
    guards = guards_of("qkv_rope_kv_update", P=torch.int64, T=torch.float32, C=torch.float32)
    guards = replace(guards, axes={"tokens": AxisBounds(maximum=64)})
    return dispatcher("qkv_rope_kv_update", kernel_of_block, guards)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def kernel() -> Iterator[Any]:
    made = dispatching()
    point = POINTS[POINT]()
    point.install(made)
    yield made
    point.remove()
    made.close()
    torch._dynamo.reset()


def stock(config: Any, layer: Any, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache without the patch's graphs."""
    return step(config, layer, hidden, SLOTS), layer.attn.kv_cache.clone()


@pytest.mark.parametrize("model", MODELS)
def test_one_call_projects_rotates_and_writes(
    model: str, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention(model)
    expected, written = stock(config, layer, hidden)
    kernel.book.reasons.clear()
    run = Compiled(layer)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    if model in NORMED:
        assert not kernel.book.calls
        [(reason, count)] = kernel.book.fallbacks.items()
        assert reason.endswith("stands between projection and rotation")
        assert count == 1
        assert "norm" in str(POINTS[POINT]().applies(layer))
        return
    assert not kernel.book.fallbacks
    assert sum(kernel.book.calls.values()) == 1
    assert run.cut == [[f"patcher::qkv_rope_kv_{kernel.book.digest}", ATTEND]]
    assert WRITE not in run.graph
    assert run.graph.count("linear") == 1  # the output's projection
    assert POINTS[POINT]().of_role(layer)


@feature("FP8 KV cache", "falls back", POINT)
def test_a_layer_with_an_fp8_cache_projects_and_writes_itself(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("llama", cache_dtype="fp8")
    for name in ("q", "k", "v"):
        getattr(layer.attn, f"_{name}_scale").fill_(0.01)
    expected, written = stock(config, layer, hidden)
    assert written.any()
    kernel.book.reasons.clear()
    assert torch.equal(step(config, layer, hidden, SLOTS, Compiled(layer)), expected)
    assert torch.equal(layer.attn.kv_cache, written)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"KV cache of fp8": 1}
    assert POINTS[POINT]().applies(layer) == "KV cache of fp8"


@pytest.mark.parametrize("model", ["gpt_oss", "llama"])
def test_with_inductor_and_after_it_is_taken_out(
    model: str, config: Any, attention: Any, hidden: Any
) -> None:
    from torch._dynamo import lookup_backend

    layer = attention(model)
    expected, written = stock(config, layer, hidden)
    kernel, point = dispatching(), POINTS[POINT]()
    point.install(kernel)
    run = Compiled(layer, rest=lookup_backend("inductor"))
    for _ in range(2):
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
        torch.testing.assert_close(layer.attn.kv_cache, written)
    assert sum(kernel.book.calls.values()) == 2
    point.remove()
    # code that was compiled with it runs vLLM's own three
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert sum(kernel.book.calls.values()) == 2
    assert not kernel.book.fallbacks
    kernel.close()
    torch._dynamo.reset()


@feature("whole graphs, `use_inductor_graph_partition`", "right", POINT)
def test_what_the_kernel_does_not_take_is_vllms_own(
    config: Any, attention: Any, kernel: Any
) -> None:
    layer = attention("gpt_oss")
    run = Compiled(layer, (ATTEND,))
    many = torch.randn(65, HIDDEN)
    slots = torch.arange(65) % 32
    slots[32:] = -1
    expected = step(config, layer, many, slots)
    written = layer.attn.kv_cache.clone()
    kernel.book.reasons.clear()
    torch.testing.assert_close(step(config, layer, many, slots, run), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert run.cut == [[ATTEND]]
    assert f"patcher::qkv_rope_kv_{kernel.book.digest}" in run.graph
    assert not kernel.book.calls
    [(reason, count)] = kernel.book.fallbacks.items()
    assert reason.startswith("tokens")
    assert count == 1
    # while vLLM measures memory there is neither cache nor slots
    layer.attn.kv_cache = torch.zeros(0)
    step(config, layer, many[:3], None, run)
    assert kernel.book.fallbacks["no KV cache yet"] == 1


@feature("other points beside it", "right", POINT, "linear")
@pytest.mark.parametrize("first", ["linear", POINT])
def test_beside_the_point_of_linear_layers_it_takes_the_projection(
    first: str, config: Any, attention: Any, hidden: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = attention("gpt_oss")
    expected, written = stock(config, layer, hidden)
    monkeypatch.setattr(POINTS["linear"], "find", lambda self: "")
    linear = dispatcher("linear", linear_kernel, guards_of("linear", T=torch.float32))
    kernel = dispatching()
    order = [(POINTS["linear"](), linear), (POINTS[POINT](), kernel)]
    for point, each in order if first == "linear" else reversed(order):
        point.install(each)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, Compiled(layer)), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert sum(kernel.book.calls.values()) == 1
    assert sum(linear.book.calls.values()) == 1  # the output's
    assert not kernel.book.fallbacks
    for point, each in order:
        point.remove()
        each.close()
    torch._dynamo.reset()


@feature("`rope_kv` and `qkv_rope_kv` together", "refused", POINT, "rope_kv")
@pytest.mark.parametrize(("inside", "other"), [("rope_kv", POINT), (POINT, "rope_kv")])
def test_of_it_and_the_point_of_rotations_one_is_refused(
    inside: str, other: str, config: Any
) -> None:
    kernels = {
        POINT: dispatching(),
        "rope_kv": dispatcher("rope_kv_update", rope_kernel, rope_guards()),
    }
    point = POINTS[inside]()
    point.install(kernels[inside])
    try:
        with pytest.raises(bench.VerificationError, match=f"{inside} is in, and {other}"):
            POINTS[other]().install(kernels[other])
    finally:
        point.remove()
    assert POINTS[other]().find()


class Reader(torch.nn.Module):
    """A model that uses query, key and value as `read` says, before they are rotated."""

    def __init__(self, layer: Any, read: Any) -> None:
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        qkv, _ = self.layer.qkv_proj(hidden_states)
        sizes = [self.layer.q_size, self.layer.kv_size, self.layer.kv_size]
        more, q, k, v = self.read(qkv, *qkv.split(sizes, dim=-1), hidden_states)
        return self.layer.attn(*self.layer.rotary_emb(positions, q, k), v) + more


LEFT = {
    "the projection is read before the rotation, or by others": (
        lambda qkv, q, k, v, x: (q.sum(), q, k, v)
    ),
    "mul stands between projection and rotation": lambda qkv, q, k, v, x: (0.0, q * 2, k, v),
    "query, key and value are parts of different tensors": (
        lambda qkv, q, k, v, x: (0.0, q, k, qkv.clone().split([64, 32, 32], -1)[2])
    ),
    "query, key and value are not all of one projection, in this order": (
        lambda qkv, q, k, v, x: (0.0, q, v, k)
    ),
    "add is given what the linear layer is given": (
        lambda qkv, q, k, v, x: ((x + 1).sum(), q, k, v)
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_another_projection_stays_vllms_own_and_is_told(
    reason: str, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("llama")
    model = Reader(layer, LEFT[reason])

    def forward(run: Any) -> torch.Tensor:
        return step(config, layer, hidden, SLOTS, run)

    expected = forward(model)
    kernel.book.reasons.clear()
    torch.testing.assert_close(forward(Compiled(model)), expected)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {reason: 1}


def test_a_layer_with_other_weights_is_told(config: Any, attention: Any) -> None:
    layer = attention("llama")
    point = POINTS[POINT]()
    assert point.applies(layer) is None
    layer.qkv_proj.quant_method = torch.nn.Identity()
    assert point.applies(layer) == "weights by Identity"
