"""Norm, router, experts and norm in one call, in graphs that the real vLLM splits, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import vllm_experts
from feature_matrix import feature
from patch_sample import kernel as add_norm
from torch.utils._pytree import tree_leaves
from vllm_experts import (
    N_EXPERTS,
    TOKENS,
    Kernel,
    calls,
    compiled,
    complete,
    gpt_oss,
    matmul_ogs,
    reduce_add_norm,
    routed_here,
    weigh,
)
from vllm_here import (
    attribute,
    config,
    dispatcher,
    guards_of,
    needs_vllm,
    nothing,
    patched,
    shipped,
)
from vllm_sample import EXPERTS

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpt_oss")  # fixtures of tests here

pytestmark = needs_vllm

POINT, HIDDEN, INNER = "moe_block", 64, 64
ALL = {
    **dict.fromkeys("TWXS", torch.bfloat16),
    **{"U": torch.uint8, "B": torch.float32, "I": torch.int32},
}


def dispatching() -> Dispatcher:
    kernel = shipped(POINT, **ALL)
    kernel.guards = replace(kernel.guards, axes={"tokens": AxisBounds(maximum=64)})
    return kernel


def other(point: str) -> Dispatcher:
    """A plain kernel of another point."""
    op = POINTS[point].op
    kernels = {"fused_add_rms_norm": add_norm, "reduce_add_rms_norm": reduce_add_norm}
    if op not in kernels:
        return shipped(op, *((("epsilon", float),) if "norm" in op else ()), **ALL)
    guards = replace(guards_of(op, **ALL), scalars=(("epsilon", float),))
    return dispatcher(op, kernels[op], guards)


def must_be_near(found: Any, expected: Any) -> None:
    """Compare with a few roundings of the largest number."""
    both = tree_leaves(found), tree_leaves(expected)
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=other.abs().max().item() / 128)


def run(config: Any, forward: Any, tokens: int = TOKENS) -> Any:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config):
        return forward(torch.arange(tokens) % 50, (torch.arange(tokens) / 7).bfloat16())


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of vLLM's routing."""
    flags = attribute("triton_kernels.matmul_ogs_details.opt_flags:make_opt_flags").__globals__
    monkeypatch.setitem(flags["_opt_flags_constraints"], "split_k", 1)
    monkeypatch.setattr(sources.module(EXPERTS), "matmul_ogs", matmul_ogs)
    for point in (POINT, *BESIDE):
        monkeypatch.setattr(POINTS[point], "find", lambda self: "")
    monkeypatch.setattr(vllm_experts, "HIDDEN", HIDDEN)
    return routed_here(monkeypatch)


@pytest.fixture
def model(routings: list[int], gpt_oss: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpt-oss whose layers run vLLM's own experts on MXFP4 weights."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    made = gpt_oss().bfloat16()
    monkeypatch.setattr(type(made.layers[0].mlp.experts), "_forward_impl", MoERunner._forward_impl)
    torch.manual_seed(5)
    for seed, layer in enumerate(made.layers):
        complete(layer.mlp.experts)
        weigh(layer.mlp.experts, INNER, 10 * seed)
    return made


BESIDE: dict[str, int] = {
    # its calls in a forward pass of more rows than the kernel may be given
    "add_norm": 0,
    "linear": 0,
    "add_norm_route": 0,
    "experts_to_norm": 0,
    "router.oai": 2,
    "experts.gate_up.mxfp4": 2,
    "experts.down.mxfp4": 2,
    "experts.sum.oai": 2,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_norm_router_experts_and_norm_are_one_call(
    backend: str, config: Any, model: Any, routings: list[int]
) -> None:
    expected = run(config, model.forward)
    many = run(config, model.forward, 65)
    assert routings == [TOKENS, TOKENS, 65, 65]
    routings.clear()
    kernel = dispatching()
    with patched(POINT, kernel):
        forward = compiled(model.forward, backend)
        for _ in range(2):
            must_be_near(run(config, forward), expected)
        assert not routings
        assert calls(kernel) == 4
        assert not kernel.book.fallbacks
        # more than the kernel may be given: the engine's own four
        must_be_near(run(config, forward, 65), many)
        assert routings == [65, 65]
        assert dict(kernel.book.fallbacks) == {"tokens above 64": 2}
    assert torch.equal(run(config, model.forward), expected)


@feature("other points beside it", "right", POINT)
@pytest.mark.parametrize("last", [False, True], ids=["first in", "last in"])
@pytest.mark.parametrize(
    ("beside", "backend"), [*((name, "eager") for name in BESIDE), ("all", "inductor")]
)
def test_beside_the_points_of_its_parts_it_takes_their_place(
    beside: str, last: bool, backend: str, config: Any, model: Any, routings: list[int]
) -> None:
    expected, many = run(config, model.forward), run(config, model.forward, 65)
    routings.clear()
    names = list(BESIDE) if beside == "all" else [beside]
    kernels = {name: other(name) for name in names}
    kernels = {**kernels, POINT: dispatching()} if last else {POINT: dispatching(), **kernels}
    with ExitStack() as stack:
        for name, kernel in kernels.items():
            stack.enter_context(patched(name, kernel))
        forward = compiled(model.forward, backend)
        must_be_near(run(config, forward), expected)
        assert not routings
        assert {name: calls(kernel) for name, kernel in kernels.items()} == {
            **dict.fromkeys(names, 0),
            POINT: 2,
        }
        must_be_near(run(config, forward, 65), many)
        assert {name: calls(kernels[name]) for name in names} == {n: BESIDE[n] for n in names}
        assert dict(kernels[POINT].book.fallbacks) == {"tokens above 64": 2}


def _hooked_router(model: Any, layer: int = 0) -> None:
    model.layers[layer].mlp.router.register_forward_hook(lambda layer, given, out: out * 2)


def _hooked_norm(model: Any) -> None:
    norm = model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda layer, given, out: (out[0] * 2, out[1]))


def _read(model: Any) -> None:
    """As EAGLE3 reads the hidden states of some layers."""
    model.aux_hidden_state_layers = (1,)


def _read_inside(model: Any) -> None:
    """A hook that adds what the experts are given to what they return, after the next norm."""
    [first, second] = model.layers
    seen: list[Any] = []
    first.mlp.register_forward_pre_hook(lambda mlp, args: seen.append(args[0]))
    second.input_layernorm.register_forward_hook(
        lambda norm, args, out: (out[0] + seen.pop(), out[1])
    )


def _other_epsilon(model: Any) -> None:
    model.norm.variance_epsilon = 1e-3


def _made_up_logits(model: Any) -> None:
    """As `VLLM_MOE_ROUTING_SIMULATION_STRATEGY` has them from 0.33.0 on."""
    router = model.layers[0].mlp.experts.router
    if not hasattr(router, "prepare_monolithic_logits"):
        pytest.skip("this vLLM has no such router")
    type(router).prepare_monolithic_logits = lambda self, logits: -logits


def _another_layout(model: Any) -> None:
    given = quantised(model.layers[0].mlp.experts)
    given.w2_precision = replace(given.w2_precision, out_dtype=torch.bfloat16)


CHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hook on a router": (_hooked_router, "mul is no linear layer without quantisation"),
    "a hook on a norm": (_hooked_norm, "mul makes what the experts are given, and no norm"),
    "EAGLE3: hidden states of layers are read": (
        _read,
        "add reads the experts' result before a norm",
    ),
    "what the experts are given is read later": (
        _read_inside,
        "add reads what is inside the block",
    ),
    "norms of different epsilons": (
        _other_epsilon,
        "an epsilon before the experts and another one after them",
    ),
    "a router of simulated logits": (_made_up_logits, "a router that replaces logits"),
    "another layout, precision or activation": (_another_layout, "another precision"),
}


LEFT: dict[str, dict[str, int]] = {
    "a hook on a router": {"add_norm": 1, "add_norm_route": 0, "experts_to_norm": 1},
    "EAGLE3: hidden states of layers are read": {
        **{"add_norm": 1, "add_norm_route": 1, "experts_to_norm": 0},
        "experts.sum.oai": 1,
    },
}
"""What the points of its parts call in the layer that it leaves."""


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside add_norm"])
@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=feature(name, "falls back", POINT)) for name in CHANGED]
)
def test_another_block_keeps_its_own_and_is_told(
    change: str, beside: bool, config: Any, model: Any
) -> None:
    switch_on, reason = CHANGED[change]
    switch_on(model)
    expected, kernel = run(config, model.forward), dispatching()
    with ExitStack() as stack:
        if beside:
            stack.enter_context(patched("add_norm", other("add_norm")))
        stack.enter_context(patched(POINT, kernel))
        must_be_near(run(config, compiled(model.forward)), expected)
    assert calls(kernel) == 1
    assert dict(kernel.book.fallbacks) == {reason: 1}


def test_experts_that_run_side_by_side_keep_their_order(config: Any, model: Any) -> None:
    """vLLM may know a layer by how many were called before it; a block is called at its end."""

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        x, made = model.embedding(ids), []
        for layer in model.layers:
            hidden, stream = layer.post_attention_layernorm(layer.attn(x, positions), x * 2)
            made.append((layer.mlp(hidden), stream))
        return [model.norm(*each) for each in made]

    _hooked_router(model, 1)  # the second stays vLLM's, so that the first must not follow it
    expected, kernel = run(config, forward), dispatching()
    with patched(POINT, kernel):
        must_be_near(run(config, compiled(forward)), expected)
    assert not calls(kernel)
    assert dict(kernel.book.fallbacks) == {
        "other experts run before the norm after these": 1,
        "mul is no linear layer without quantisation": 1,
    }


@pytest.mark.parametrize("tokens", [TOKENS, 65])
def test_a_part_of_what_is_read_later_is_not_written(tokens: int, config: Any, model: Any) -> None:
    """vLLM's own norm and router, which run beyond the guards, write what the block is given."""
    mix, seen = model.layers[0].attn.forward, list[Any]()

    def attend(hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        seen.append(torch.cat([mix(hidden, positions)] * 2, 1))
        return seen[0][:, :HIDDEN]

    def forward(*given: Any) -> Any:
        return model.forward(*given) + seen.pop()[:, :HIDDEN]

    model.layers[0].attn.forward = attend
    expected, kernel = run(config, forward, tokens), dispatching()
    with patched(POINT, kernel):
        must_be_near(run(config, compiled(forward), tokens), expected)
    assert calls(kernel) == (tokens == TOKENS)
    part = "what the norm is given is read later as a part of something else"
    assert kernel.book.fallbacks[part] == 1


@pytest.mark.parametrize("change", LEFT)
def test_what_it_leaves_is_fused_by_the_points_of_its_parts(
    change: str, config: Any, model: Any
) -> None:
    CHANGED[change][0](model)
    expected = run(config, model.forward)
    kernels = {name: other(name) for name in LEFT[change]} | {POINT: dispatching()}
    with ExitStack() as stack:
        for name, kernel in kernels.items():
            stack.enter_context(patched(name, kernel))
        must_be_near(run(config, compiled(model.forward)), expected)
    found = {name: calls(kernel) for name, kernel in kernels.items()}
    assert found == {**LEFT[change], POINT: 1}


@feature("`enforce_eager`, mode NONE", "falls back", POINT)
def test_a_model_that_is_not_compiled_keeps_its_own_and_says_so(config: Any, model: Any) -> None:
    expected, kernel = run(config, model.forward), dispatching()
    with patched(POINT, kernel):
        assert torch.equal(run(config, model.forward), expected)
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"not in a graph that vLLM compiles": 2}


@feature("new weights: in place, `.data`, a new Parameter", "right", POINT)
def test_new_weights_count_and_a_layer_that_changed_is_the_engines(
    config: Any, model: Any, routings: list[int]
) -> None:
    first, second = model.layers
    old, kernel = run(config, model.forward), dispatching()
    with patched(POINT, kernel):
        forward = compiled(model.forward)
        must_be_near(run(config, forward), old)
        quantised(first.mlp.experts).w2_bias.data.mul_(-2)
        weigh(second.mlp.experts, INNER, 77)
        second.input_layernorm.weight.data = second.input_layernorm.weight.data * 3
        model.norm.weight = torch.nn.Parameter(model.norm.weight.data * 5, requires_grad=False)
        second.mlp.router.bias.data.add_(torch.randn(N_EXPERTS).bfloat16())
        routings.clear()
        found = run(config, forward)
        assert (calls(kernel), routings) == (4, [])
        # as LoRA and elastic expert parallelism change them
        second.mlp.experts.routed_experts.expert_map = torch.arange(N_EXPERTS)
        first.mlp.experts.routed_experts.apply_router_weight_on_input = True
        again = run(config, forward)
    expected = run(config, model.forward)
    must_be_near(found, expected)
    must_be_near(again, expected)
    with pytest.raises(AssertionError):
        must_be_near(found, old)
    assert calls(kernel) == 4
    assert dict(kernel.book.fallbacks) == {
        "another kind of routing": 1,
        "experts shared by several ranks": 1,
    }


TOLD: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
    # what is changed, and where
    "experts that hold their router": lambda layer: (layer, "gate", nothing),
    "shared experts": lambda layer: (layer, "_shared_experts", nothing),
    "tokens shared by several ranks": lambda layer: (layer.moe_config, "dp_size", 2),
    "experts shared by several ranks": lambda layer: (layer.routed_experts, "expert_map", 1),
    "experts without biases": lambda layer: (quantised(layer), "w1_bias", None),
    "another layout of weights": lambda layer: (quantised(layer), "w1_precision", None),
    "another kind of routing": lambda layer: (
        layer.routed_experts,
        "apply_router_weight_on_input",
        True,
    ),
    "experts by UnfusedOAITritonExperts": lambda layer: (
        layer.method,
        "moe_kernel",
        Kernel("UnfusedOAITritonExperts"),
    ),
}


def quantised(layer: Any) -> Any:
    return layer.method.moe_kernel.fused_experts.quant_config


@feature("shared experts", "falls back", POINT)
@feature("LoRA on experts", "falls back", POINT)
@feature("expert parallelism", "falls back", POINT)
@feature("experts of EPLB, data parallelism, all2all, Marlin or FlashInfer", "falls back", POINT)
@pytest.mark.parametrize("reason", TOLD)
def test_layers_with_other_experts_are_told(reason: str, model: Any) -> None:
    layer, point = model.layers[0].mlp.experts, POINTS[POINT]()
    assert point.of_role(layer)
    assert point.applies(layer) is None
    assert dispatching().guards.refusal_for_good(point.constants(layer)) is None
    setattr(*TOLD[reason](layer))
    assert point.applies(layer) == reason


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_it_refuses_an_engine_that_must_be_invariant_to_batches(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT"):
        POINTS[POINT]().find()
