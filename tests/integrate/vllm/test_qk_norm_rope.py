"""Norms of heads and rotation in one call, in the attention layers of the real vLLM, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_attention import (
    ATTEND,
    HIDDEN,
    MODELS,
    PIECEWISE,
    WRITE,
    Compiled,
    attention,
    rope_guards,
    rope_kernel,
    step,
)
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher import bench
from patcher.bench.runner.loading import load
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm.points import POINTS

__all__ = ("attention", "config")  # fixtures of tests here

pytestmark = needs_vllm

POINT = "qk_norm_rope"
SLOTS = torch.tensor([5, -1, 20])
PLAIN = ("qwen3", "qwen3_moe")
NORM = "vllm_ir::rms_norm"


def dispatching() -> Dispatcher:
    """Of the op's plain kernel in PyTorch, for at most 64 tokens."""
    guards = guards_of(POINT, T=torch.float32, C=torch.float32)
    guards = replace(guards, axes={"tokens": AxisBounds(maximum=64)}, scalars=(("epsilon", float),))
    source = bench.load_op(POINT).folder / "solutions" / "cpu_torch" / f"{POINT}.py"
    return dispatcher(POINT, load(str(source), "python", POINT), guards)


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
def test_one_call_norms_and_rotates(
    model: str, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention(model)
    expected, written = stock(config, layer, hidden)
    kernel.book.reasons.clear()
    run = Compiled(layer)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert run.cut == [[WRITE], [ATTEND]] or run.cut == [[WRITE, ATTEND]]
    if model not in PLAIN:
        assert not kernel.book.calls
        [(reason, count)] = kernel.book.fallbacks.items()
        assert count == 1
        if model == "gemma3":
            assert reason == "a weight that is computed, or of another dtype"
            assert POINTS[POINT]().applies(layer) == "a norm of class GemmaRMSNorm"
        else:
            assert reason == "getitem makes what is rotated, and no norm"
            assert not POINTS[POINT]().of_role(layer)
        return
    assert not kernel.book.fallbacks
    assert sum(kernel.book.calls.values()) == 1
    operators = [name for name in run.graph if name.startswith(("patcher::", "vllm"))]
    assert operators == [f"patcher::qk_norm_rope_{kernel.book.digest}", WRITE, ATTEND]
    assert not {"cat", "enter", "leave"} & {*run.graph}
    point = POINTS[POINT]()
    assert point.of_role(layer)
    assert point.applies(layer) is None
    assert point.constants(layer)["k_weight"].data_ptr() == layer.k_norm.weight.data_ptr()


@pytest.mark.parametrize("model", PLAIN)
def test_after_it_is_taken_out_all_is_as_it_was(
    model: str, config: Any, attention: Any, hidden: Any
) -> None:
    layer = attention(model)
    plain = Compiled(layer)
    before = step(config, layer, hidden, SLOTS, plain)
    for _ in range(2):  # in, out and in again
        torch._dynamo.reset()
        kernel, point = dispatching(), POINTS[POINT]()
        point.install(kernel)
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, Compiled(layer)), before)
        assert sum(kernel.book.calls.values()) == 1
        point.remove()
        kernel.close()
        torch._dynamo.reset()
        again = Compiled(layer)
        assert torch.equal(step(config, layer, hidden, SLOTS, again), before)
        assert again.graph == plain.graph


@feature("whole graphs, `use_inductor_graph_partition`", "right", POINT)
@pytest.mark.parametrize("splitting_ops", [PIECEWISE, ()])
def test_by_inductor_query_and_key_stay_where_they_are(
    splitting_ops: tuple[str, ...], config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    from torch._inductor import compile_fx

    from patcher.integrate.vllm.roles.rope_graph import keep_in_place

    overload = getattr(torch.ops.patcher, f"qk_norm_rope_{kernel.book.digest}").default
    left: list[str] = []

    def passes(graph: torch.fx.Graph) -> None:
        keep_in_place(graph, overload)
        left.extend(str(node.args[0]) for node in graph.nodes if "auto_funct" in str(node.target))

    def inductor(module: torch.fx.GraphModule, given: Any) -> Any:
        more = {"enable_auto_functionalized_v2": False, "fx_graph_cache": False}
        return compile_fx.compile_fx(
            module, given, config_patches={**more, "post_grad_custom_post_pass": passes}
        )

    layer = attention("qwen3")
    expected, written = stock(config, layer, hidden)
    kernel.book.reasons.clear()
    run = Compiled(layer, splitting_ops, inductor)
    for _ in range(2):
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
        torch.testing.assert_close(layer.attn.kv_cache, written)
    assert sum(kernel.book.calls.values()) == 2
    assert not kernel.book.fallbacks
    assert not [name for name in left if "qk_norm_rope" in name]


def test_what_the_kernel_does_not_take_is_vllms_own(
    config: Any, attention: Any, kernel: Any
) -> None:
    layer = attention("qwen3")
    many, slots = torch.randn(65, HIDDEN), torch.arange(65) % 32
    slots[32:] = -1
    expected = step(config, layer, many, slots)
    written = layer.attn.kv_cache.clone()
    kernel.book.reasons.clear()
    torch.testing.assert_close(step(config, layer, many, slots, Compiled(layer)), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"tokens above 64": 1}


@feature("`enforce_eager`, mode NONE", "falls back", POINT)
def test_outside_of_compiled_graphs_it_is_vllms_and_counted(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    step(config, attention("qwen3"), hidden, SLOTS)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"outside vLLM's compiled graphs": 1}


@feature("`rope_kv` and `qkv_rope_kv` together", "refused", POINT)
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


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_a_batch_invariant_engine_refuses_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[POINT]().find()


def test_a_pass_that_would_fuse_the_chain_loses_it_and_is_named(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passes = config.compilation_config.pass_config
    monkeypatch.setattr(passes, "enable_qk_norm_rope_fusion", True)
    kernel, point = dispatching(), POINTS[POINT]()
    point.install(kernel)
    point.remove()
    kernel.close()
    assert "no longer fused by enable_qk_norm_rope_fusion" in caplog.text


class Reader(torch.nn.Module):
    """A model that uses query and key as `change` says, before the rotation."""

    def __init__(self, layer: Any, change: Any) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        layer = self.layer
        qkv, _ = layer.qkv_proj(hidden_states)
        rows = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
        more, q, k = self.change(layer, *rows[:2])
        q, k = layer.rotary_emb(positions, q, k)
        return layer.attn(q, k, rows[2]) + more(rows, q)


def rotated_again(layer: Any, q: Any, k: Any) -> Any:
    normed_q, normed_k = normed(layer.q_norm, q), normed(layer.k_norm, k)
    positions = torch.zeros(len(q), dtype=torch.long)
    return (
        lambda *_: layer.rotary_emb(positions, normed_q, normed_k)[1].sum(),
        normed_q,
        normed_k,
    )


def normed(norm: Any, rows: Any) -> Any:
    return norm(rows.view(len(rows), -1, norm.weight.shape[0])).view(rows.shape)


def nothing_more(rows: Any, q: Any) -> Any:
    return 0.0


def another(layer: Any, q: Any, k: Any, change: Any, more: Any = nothing_more) -> Any:
    normed_q, normed_k = normed(layer.q_norm, q), normed(layer.k_norm, k)
    return more, *change(q, k, normed_q, normed_k)


LEFT = {
    "mul makes what is rotated, and no norm": (
        lambda layer, q, k: another(layer, q, k, lambda q, k, m, n: (m * 2, n))
    ),
    "getitem makes what is rotated, and no norm": (
        lambda layer, q, k: another(layer, q, k, lambda q, k, m, n: (m, k))
    ),
    "sum reads what the norm makes, too": (
        lambda layer, q, k: (lambda m: (lambda *_: m.sum(), m, normed(layer.k_norm, k)))(
            normed(layer.q_norm, q)
        )
    ),
    "the tensors before the norms are used again": (
        lambda layer, q, k: another(layer, q, k, lambda *t: t[2:], lambda rows, _: rows[0].sum())
    ),
    "rotated tensors that are read in another shape": (
        lambda layer, q, k: another(layer, q, k, lambda *t: t[2:], lambda _, q: q.view(-1).sum())
    ),
    "another rotation reads what the norm makes, too": rotated_again,
    "query and key share memory": lambda layer, q, k: (
        nothing_more,
        normed(layer.q_norm, q),
        normed(layer.k_norm, q[:, : k.shape[1]]),
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_another_chain_stays_vllms_own_and_is_told(
    reason: str, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("qwen3")
    model = Reader(layer, LEFT[reason])
    expected = step(config, layer, hidden, SLOTS, model)
    kernel.book.reasons.clear()
    run = Compiled(model)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {reason: 2 if reason.startswith("another") else 1}
    assert NORM in run.graph or f"{NORM}.default" in run.graph


def with_other_epsilon(layer: Any) -> None:
    layer.k_norm.variance_epsilon = 0.1


def without_neox(layer: Any) -> None:
    layer.rotary_emb.is_neox_style = False


KEPT = {
    "norms of query and key with an epsilon each": with_other_epsilon,
    "another kind of rotation": without_neox,
}


@pytest.mark.parametrize("reason", KEPT)
def test_another_layer_stays_vllms_own_and_says_so(
    reason: str, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("qwen3")
    KEPT[reason](layer)
    expected = step(config, layer, hidden, SLOTS)
    kernel.book.reasons.clear()
    assert POINTS[POINT]().applies(layer) == reason
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, Compiled(layer)), expected)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {reason: 1}
