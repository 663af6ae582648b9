"""Norm, router and routing in one call, in graphs that the real vLLM splits, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import kernel as add_norm
from vllm_experts import (
    HIDDEN,
    TOKENS,
    TOP_K,
    calls,
    compiled,
    gpt_oss,
    reduce_add_norm,
    routed_here,
)
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher import bench
from patcher.bench.runner.loading import load
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpt_oss")  # fixtures of tests here

pytestmark = needs_vllm

POINT, EXPERTS = "add_norm_route", 4
F32 = {"T": torch.float32, "W": torch.float32}


def solution(op: str) -> Any:
    """The plain right solution of an op for the CPU."""
    folder = bench.load_op(op).folder / "solutions" / "cpu_torch"
    return load(str(folder / f"{op}.py"), "python", op)


def dispatching(op: str = "add_rms_norm_route", **dtypes: Any) -> Dispatcher:
    kernels = {"fused_add_rms_norm": add_norm, "reduce_add_rms_norm": reduce_add_norm}
    guards = guards_of(op, **(dtypes or {**F32, "I": torch.int32}))
    axes = {"tokens": AxisBounds(maximum=64)} if op == "add_rms_norm_route" else {}
    scalars = (("epsilon", float),) if "norm" in op else ()
    made = replace(guards, axes=axes, scalars=scalars)
    return dispatcher(op, kernels.get(op) or solution(op), made)


@contextmanager
def patched(kernel: Dispatcher, point: str = POINT) -> Iterator[None]:
    installed = POINTS[point]()
    installed.install(kernel)
    try:
        yield
    finally:
        installed.remove()
        kernel.close()
        torch._dynamo.reset()


def run(config: Any, forward: Any, tokens: int = TOKENS) -> Any:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config):
        return forward(torch.arange(tokens) % 50, torch.arange(tokens) / 7)


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of vLLM's routing."""
    for point in (POINT, "router.oai", "experts_to_norm", "linear", "add_norm"):
        monkeypatch.setattr(POINTS[point], "find", lambda self: "")
    return routed_here(monkeypatch)


@pytest.fixture
def model(gpt_oss: Any, routings: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpt-oss whose experts are routed by the library's function, and summed by its other one."""
    made = gpt_oss()

    def forward(self: Any, hidden: Any, logits: Any, *rest: Any) -> Any:
        data, gather, _ = sys.modules["triton_kernels.routing"].routing(logits, TOP_K)
        token = gather.src_indx.long() // TOP_K
        expert = torch.repeat_interleave(torch.arange(EXPERTS), data.expt_hist.long())
        rows = torch.einsum("rh,rhk->rk", hidden[token], self.maps[expert])
        rows = rows * data.gate_scal[:, None]
        library = sys.modules["triton_kernels.matmul_ogs"]
        plain = library.FusedActivation(), library.Epilogue(library.FnSpecs.default())
        output = torch.full_like(hidden, torch.nan)
        index = gather.dst_indx.view(-1, TOP_K)
        more = {"x_mx_scale": None, "out_dtype": output.dtype}
        summed, _ = library.reduce_grouped(
            rows[None, None], index, output[None], None, *plain, **more
        )
        return summed[0]

    monkeypatch.setattr(type(made.layers[0].mlp.experts), "_forward_impl", forward)
    return made


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_norm_router_and_routing_are_one_call(
    backend: str, config: Any, model: Any, routings: list[int]
) -> None:
    expected = run(config, model.forward)
    many = run(config, model.forward, 65)
    assert routings == [TOKENS, TOKENS, 65, 65]
    routings.clear()
    kernel = dispatching()
    with patched(kernel):
        forward = compiled(model.forward, backend)
        for _ in range(2):
            torch.testing.assert_close(run(config, forward), expected)
        assert not routings
        assert calls(kernel) == 4
        assert not kernel.book.fallbacks
        # more than the kernel may be given: the engine's own three
        torch.testing.assert_close(run(config, forward, 65), many)
        assert routings == [65, 65]
        [(reason, count)] = kernel.book.fallbacks.items()
        assert reason.startswith("tokens")
        assert count == 2
    assert torch.equal(run(config, model.forward), expected)


BESIDE: dict[str, tuple[dict[str, Any], int]] = {
    # dtypes of its op, and its calls in a forward pass of two layers, beside this point
    "add_norm": ({"T": torch.float32, "W": torch.float32}, 2),
    "linear": ({"T": torch.float32}, 0),
    "router.oai": ({"T": torch.float32, "I": torch.int32}, 0),
    "experts_to_norm": ({**F32, "I": torch.int32}, 2),
}


@feature("other points beside it", "right", POINT, *BESIDE)
@pytest.mark.parametrize("last", [False, True], ids=["first in", "last in"])
@pytest.mark.parametrize(
    ("beside", "backend"), [*((name, "eager") for name in BESIDE), ("all", "inductor")]
)
def test_beside_the_points_of_its_parts_it_takes_its_place(
    beside: str, last: bool, backend: str, config: Any, model: Any, routings: list[int]
) -> None:
    expected = run(config, model.forward)
    routings.clear()
    names = list(BESIDE) if beside == "all" else [beside]
    kernels = {name: dispatching(POINTS[name].op, **BESIDE[name][0]) for name in names}
    kernels = {**kernels, POINT: dispatching()} if last else {POINT: dispatching(), **kernels}
    with ExitStack() as stack:
        for name, kernel in kernels.items():
            stack.enter_context(patched(kernel, name))
        torch.testing.assert_close(run(config, compiled(model.forward, backend)), expected)
    assert calls(kernels[POINT]) == 2
    assert not kernels[POINT].book.fallbacks
    assert not routings
    for name in names:
        own = 0 if name == "add_norm" and "experts_to_norm" in names else BESIDE[name][1]
        assert calls(kernels[name]) == own, name


def test_what_it_leaves_is_routed_by_the_point_of_the_router(
    config: Any, model: Any, routings: list[int]
) -> None:
    expected = run(config, model.forward, 65)
    routings.clear()
    kernel, route = dispatching(), dispatching("moe_route", T=torch.float32, I=torch.int32)
    with patched(kernel), patched(route, "router.oai"):
        torch.testing.assert_close(run(config, compiled(model.forward), 65), expected)
    assert (calls(kernel), calls(route), routings) == (0, 2, [])


def _hooked_router(model: Any) -> None:
    model.layers[0].mlp.router.register_forward_hook(lambda layer, given, out: out * 2)


def _hooked_norm(model: Any) -> None:
    norm = model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda layer, given, out: (out[0] * 2, out[1]))


def _other_experts(model: Any) -> None:
    from vllm_experts import Kernel

    model.layers[0].mlp.experts.method.moe_kernel = Kernel("OAITritonExperts")


def _shared_ranks(model: Any) -> None:
    model.layers[1].mlp.experts.routed_experts.expert_map = torch.zeros(4)


CHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hook on a router": (_hooked_router, "mul is no linear layer without quantisation"),
    "a hook on a norm": (_hooked_norm, "mul makes what the experts are given, and no norm"),
    "experts of another class": (_other_experts, "experts by OAITritonExperts"),
    "expert parallelism": (_shared_ranks, "experts shared by several ranks"),
}


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=feature(name, "falls back", POINT)) for name in CHANGED]
)
def test_another_block_keeps_its_own_and_is_told(change: str, config: Any, model: Any) -> None:
    switch_on, reason = CHANGED[change]
    switch_on(model)
    expected = run(config, model.forward)
    kernel = dispatching()
    with patched(kernel):
        torch.testing.assert_close(run(config, compiled(model.forward)), expected)
    assert calls(kernel) == 1
    assert dict(kernel.book.fallbacks) == {reason: 1}


@feature("`enforce_eager`, mode NONE", "falls back", POINT)
def test_a_model_that_is_not_compiled_keeps_its_own_and_says_so(config: Any, model: Any) -> None:
    expected, kernel = run(config, model.forward), dispatching()
    with patched(kernel):
        assert torch.equal(run(config, model.forward), expected)
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"not in a graph that vLLM compiles": 2}


def test_only_the_call_with_the_kernels_own_logits_takes_what_it_routed(
    config: Any, model: Any, routings: list[int]
) -> None:
    kernel = dispatching()
    library = sources.module("triton_kernels.routing")
    x, residual, logits = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN), torch.empty(3, EXPERTS)
    weights = torch.rand(HIDDEN), torch.randn(EXPERTS, HIDDEN), torch.randn(EXPERTS)
    with patched(kernel), torch.no_grad():
        operation = getattr(torch.ops.patcher, f"add_norm_route_{kernel.book.digest[:12]}")

        def start() -> None:
            operation(x, residual, *weights, logits, TOP_K, 1e-5)

        start()
        first = library.routing(logits, TOP_K)
        assert not routings
        again = library.routing(logits, TOP_K)  # taken once
        assert routings == [3]
        assert torch.equal(first[0].gate_scal, again[0].gate_scal)
        others: tuple[Callable[[], Any], ...] = (
            lambda: library.routing(logits.clone(), TOP_K),
            lambda: library.routing(logits, TOP_K - 1),
            lambda: library.routing(logits[:2], TOP_K),
            lambda: library.routing(logits, TOP_K, True),
        )
        for other in others:
            routings.clear()
            start()
            other()
            assert len(routings) == 1
            library.routing(logits, TOP_K)  # nothing is left of it
            assert len(routings) == 2
    assert kernel.book.fallbacks["experts that route otherwise"] == 4


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT, "qkv_rope_kv")
@pytest.mark.parametrize("point", [POINT, "qkv_rope_kv"])
def test_it_refuses_an_engine_that_must_be_invariant_to_batches(
    point: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT"):
        POINTS[point]().find()
