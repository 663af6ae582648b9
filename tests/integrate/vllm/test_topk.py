"""The router of vLLM's experts that do not route by themselves, with a double for its C kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_gpu import routed
from vllm_here import config, needs_vllm, patched, shipped

from patcher.integrate.survey import survey

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

TOKENS, EXPERTS, TOP_K = 5, 8, 2
DTYPES = {"T": torch.bfloat16, "S": torch.float32, "I": torch.int32}


@pytest.fixture
def topk_softmax(config: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In the place of vLLM's C kernel; the rows that it was given."""
    from vllm import _custom_ops

    rows: list[int] = []

    def double(weights: Any, ids: Any, _: Any, logits: Any, renormalise: bool, **more: Any) -> None:
        rows.append(len(logits))
        routed(weights, ids, _, logits, renormalise, **more)

    monkeypatch.setattr(_custom_ops, "topk_softmax", double)
    monkeypatch.setattr(_custom_ops, "topk_sigmoid", double)
    return rows


def router_of(**settings: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    return FusedTopKRouter(top_k=TOP_K, global_num_experts=EXPERTS, **settings)


def route(router: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.linspace(-3, 3, TOKENS * EXPERTS).sin().mul(4).view(TOKENS, EXPERTS).to(dtype)
    weights, ids = router._compute_routing(logits, logits, None)
    return weights, ids


@feature("`enforce_eager`, mode NONE", "right", "router.topk")
def test_tokens_go_where_the_engine_sends_them(topk_softmax: list[int]) -> None:
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    router = router_of()
    weights, ids = route(router)
    wide = route(router, torch.float32)
    topk_softmax.clear()
    kernel = shipped("moe_topk", **DTYPES)
    with patched("router.topk", kernel):
        found = route(router)
        torch.testing.assert_close(found[0], weights)
        assert torch.equal(found[1], ids)
        assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.int32)
        assert not topk_softmax
        for given, own in zip(route(router, torch.float32), wide, strict=True):
            assert torch.equal(given, own)
        assert sum(kernel.book.calls.values()) == 1
        assert dict(kernel.book.fallbacks) == {"dtype float32/float32/int32": 1}
    assert topk_softmax == [TOKENS]
    assert "_compute_routing" in vars(fused_topk_router.FusedTopKRouter)


@feature("rows of padding that experts skip", "right", "router.topk")
def test_rows_of_padding_have_no_expert(
    topk_softmax: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    if not hasattr(fused_topk_router, "_get_padding_mask"):
        pytest.skip("this vLLM routes rows of padding, too")
    padding = torch.arange(TOKENS) >= 3
    context = SimpleNamespace(is_padding=padding)
    monkeypatch.setattr(fused_topk_router, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(fused_topk_router, "get_forward_context", lambda: context)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    weights, ids = route(router_of())
    assert ids[3:].eq(-1).all()
    assert ids[:3].ge(0).all()
    with patched("router.topk", shipped("moe_topk", **DTYPES)):
        found = route(router_of())
    assert torch.equal(found[1], ids)
    torch.testing.assert_close(found[0][:3], weights[:3])


@feature(
    "other scores, other routers, experts that route by themselves", "falls back", "router.topk"
)
def test_routers_that_the_op_does_not_describe_have_a_reason(topk_softmax: list[int]) -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    def runner(router: Any, alone: bool = False) -> Any:
        layer = MoERunner.__new__(MoERunner)
        torch.nn.Module.__init__(layer)
        method = SimpleNamespace(is_monolithic=alone)
        layer.routed_experts = torch.nn.Linear(1, 1)
        layer.routed_experts.quant_method = method
        layer.router = router
        return layer

    class Other:
        pass

    layers = [
        *(runner(router_of()), runner(router_of(), alone=True), runner(Other())),
        *(runner(router_of(scoring_func="sigmoid")), runner(router_of(renormalize=False))),
    ]
    kernel = shipped("moe_topk", **DTYPES)
    with patched("router.topk", kernel) as point:
        seen = survey(point, kernel.guards, layers)
        assert (seen.taken, dict(seen.refused)) == (
            1,
            {
                "experts that route by themselves": 1,
                "routing by Other": 1,
                "scores by sigmoid": 1,
                "weights that are not renormalised": 1,
            },
        )
        for layer in layers[3:]:
            topk_softmax.clear()
            route(layer.router)
            assert topk_softmax == [TOKENS]
        assert not kernel.book.calls


@feature("a layer that computes something else", "falls back", "router.topk")
def test_a_router_that_fails_its_trial_stays_with_the_engine(
    topk_softmax: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import _custom_ops

    router, kernel = router_of(), shipped("moe_topk", **DTYPES)
    own = _custom_ops.topk_softmax

    def other(weights: Any, *rest: Any, **more: Any) -> None:
        own(weights, *rest, **more)
        weights.mul_(2.5)  # as a model that scales its routed experts

    monkeypatch.setattr(_custom_ops, "topk_softmax", other)
    expected = route(router)
    with patched("router.topk", kernel) as point:
        layer = SimpleNamespace(
            router=router, is_monolithic=False, parameters=lambda: iter([torch.zeros(1)])
        )
        assert point.applies(layer) == "it computes something else"
        for given, stock in zip(route(router), expected, strict=True):
            assert torch.equal(given, stock)
        assert not kernel.book.calls
