"""vLLM's routers that choose by groups, with a bias or by sigmoid, with doubles for its C kernels.
The function of the grouped one is the engine's own, not compiled; its fused kernel needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, needs_vllm, patched, shipped

from patcher.bench import load_op
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm import sources

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT = "router.grouped_topk"
TOKENS, EXPERTS, TOP_K = 5, 16, 4
DTYPES = {"T": torch.float32, "B": torch.float32, "F": torch.float32, "I": torch.int32}
BIAS = torch.linspace(-2, 2, EXPERTS).cos().roll(3)


@pytest.fixture
def engines(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In the place of vLLM's C kernels; the rows that they were given."""
    from vllm import _custom_ops

    rows: list[int] = []

    def double(sigmoid: bool) -> Any:
        def run(weights: Any, ids: Any, _: Any, logits: Any, renormalise: bool, *more: Any) -> None:
            rows.append(len(logits))
            bias, scaling = (*more, *(None, 1.0)[len(more) :])[:2]
            scores = logits.sigmoid() if sigmoid else logits.softmax(1)
            values = scores if bias is None else scores + bias
            order = values.sort(dim=1, descending=True, stable=True).indices[:, : ids.shape[1]]
            picked = scores.gather(1, order)
            whole = picked.sum(1, keepdim=True) if renormalise else 1.0
            weights.copy_(picked / whole * scaling)
            ids.copy_(order)

        def skipping(*arguments: Any, is_padding: Any = None) -> None:
            run(*arguments)
            if is_padding is not None:
                arguments[1].masked_fill_(is_padding.unsqueeze(1), -1)

        return skipping

    monkeypatch.setattr(_custom_ops, "topk_softmax", double(False))
    monkeypatch.setattr(_custom_ops, "topk_sigmoid", double(True))
    with torch.compiler.set_stance("force_eager"):
        yield rows


def kernel_of() -> Dispatcher:
    """The plain kernel, for few tokens, within the guards of the contract."""
    kernel = shipped("grouped_topk", ("scaling", float), **DTYPES)
    own = load_op("grouped_topk").contract.guards.axes
    axes = {axis: AxisBounds(guard.minimum, guard.maximum) for axis, guard in own.items()}
    kernel.guards = replace(kernel.guards, axes={**axes, "tokens": AxisBounds(maximum=64)})
    return kernel


def home(name: str) -> Any:
    return sources.module(f"vllm.model_executor.layers.fused_moe.router.{name}")


def grouped(bias: torch.Tensor | None = BIAS, **settings: Any) -> Any:
    known = {"num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "top_k": TOP_K}
    known |= {"routed_scaling_factor": 2.5, "global_num_experts": EXPERTS}
    made = home("grouped_topk_router").GroupedTopKRouter
    return made(e_score_correction_bias=bias, **known | settings)


def biased(bias: torch.Tensor | None = BIAS, **settings: Any) -> Any:
    known = {"routed_scaling_factor": 2.5, "e_score_correction_bias": bias} | settings
    return home("fused_topk_bias_router").FusedTopKBiasRouter(TOP_K, EXPERTS, **known)


def plain(bias: None = None, **settings: Any) -> Any:
    known = {"scoring_func": "sigmoid"} | settings
    return home("fused_topk_router").FusedTopKRouter(TOP_K, EXPERTS, **known)


def logits_of(dtype: torch.dtype = torch.float32, experts: int = EXPERTS) -> torch.Tensor:
    return torch.linspace(-3, 3, TOKENS * experts).sin().mul(4).view(TOKENS, experts).to(dtype)


def route(router: Any, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts, those of a token in ascending order: the engine has them in any."""
    logits = logits_of() if logits is None else logits
    weights, ids = router._compute_routing(logits, logits, None)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    ids, order = ids.sort(1)
    return weights.gather(1, order), ids


def same(one: Any, other: Any) -> bool:
    return torch.equal(one[1], other[1]) and torch.allclose(one[0], other[0], rtol=1e-5)


def layer_of(router: Any, alone: bool = False) -> Any:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layer = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(layer)
    layer.routed_experts = torch.nn.Linear(1, 1)
    layer.routed_experts.quant_method = SimpleNamespace(is_monolithic=alone)
    layer.router = router
    return layer


CASES = [
    (grouped, {}),
    (grouped, {"renormalize": False}),
    (grouped, {"num_expert_group": 1, "topk_group": 1}),
    (grouped, {"bias": None, "scoring_func": "softmax", "renormalize": False}),
    (grouped, {"bias": None}),
    (grouped, {"routed_scaling_factor": -1.5}),
    (biased, {}),
    (biased, {"scoring_func": "softmax", "renormalize": False, "routed_scaling_factor": 1.0}),
    (plain, {}),
    (plain, {"renormalize": False}),
    (plain, {"scoring_func": "softmax", "renormalize": False}),
]


@feature("`enforce_eager`, mode NONE", "right", POINT)
@pytest.mark.parametrize(("make", "settings"), CASES)
def test_tokens_go_where_the_engine_sends_them(
    make: Any, settings: dict[str, Any], engines: list[int]
) -> None:
    router = make(**settings)
    expected = route(router)
    kernel = kernel_of()
    with patched(POINT, kernel) as point:
        # by its trial, too
        assert survey(point, kernel.guards, [layer_of(router)]).taken == 1
        engines.clear()
        assert same(route(router), expected)
        assert sum(kernel.book.calls.values()) == 1
        assert not engines
        assert not kernel.book.fallbacks
        many = logits_of().repeat(13, 1)
        given = route(router, many)
        assert dict(kernel.book.fallbacks) == {"tokens above 64": 1}
    assert same(given, route(router, many))
    assert same(route(router), expected)


@pytest.mark.parametrize("order", [("router.topk", POINT), (POINT, "router.topk")])
def test_the_points_of_one_class_take_their_own_routers(
    order: tuple[str, str], engines: list[int]
) -> None:
    owner = home("fused_topk_router").FusedTopKRouter
    stock = owner._compute_routing
    of_topk = shipped("moe_topk", T=torch.float32, S=torch.float32, I=torch.int32)
    kernels = {POINT: kernel_of(), "router.topk": of_topk}
    routers = {POINT: plain(), "router.topk": plain(scoring_func="softmax")}
    expected = {name: route(router) for name, router in routers.items()}
    with ExitStack() as stack:
        stack.enter_context(patched(order[1], kernels[order[1]]))
        with patched(order[0], kernels[order[0]]):
            for name, router in routers.items():
                engines.clear()
                assert same(route(router), expected[name])
                assert not engines
        assert same(route(routers[order[1]]), expected[order[1]])
        assert not engines
        assert same(route(routers[order[0]]), expected[order[0]])
        assert engines, "the other point is out"
    calls = {name: kernel.book.calls.total() for name, kernel in kernels.items()}
    assert calls == {order[0]: 1, order[1]: 2}
    assert not any(kernel.book.fallbacks for kernel in kernels.values())
    assert owner._compute_routing is stock


@pytest.mark.parametrize("later", [-BIAS, None])
def test_a_bias_that_is_loaded_or_taken_away_later_counts(
    later: torch.Tensor | None, engines: list[int]
) -> None:
    router, kernel = grouped(), kernel_of()
    expected = route(grouped(later))
    assert not same(expected, route(router)), "else nothing is told"
    with patched(POINT, kernel):
        route(router)
        router.e_score_correction_bias = later
        engines.clear()
        assert same(route(router), expected)
        assert not engines


@feature("`enforce_eager`, mode NONE", "right", POINT)
def test_calls_beyond_the_guards_are_the_engines(engines: list[int]) -> None:
    calls = {
        "dtype bfloat16/float32/int32/float32": (grouped(), logits_of(torch.bfloat16)),
        "dtype float32/bfloat16/int32/float32": (grouped(BIAS.bfloat16()), logits_of()),
        "n_experts above 512": (grouped(torch.zeros(1024)), logits_of(experts=1024)),
        "tokens above 64": (plain(), logits_of().repeat(13, 1)),
        # then the engine routes without groups
        "experts that make no groups": (grouped(num_expert_group=5), logits_of()),
    }
    for reason, (router, logits) in calls.items():
        expected = route(router, logits)
        kernel = kernel_of()
        with patched(POINT, kernel):
            assert same(route(router, logits), expected)
            assert dict(kernel.book.fallbacks) == {reason: 1}
            assert not kernel.book.calls


@feature("rows of padding that experts skip", "right", POINT)
@pytest.mark.parametrize("make", [grouped, biased, plain])
def test_rows_of_padding_have_no_expert(
    make: Any, engines: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "fused_topk_bias_router", "grouped_topk_router", "fused_topk_router"
    modules = [home(name) for name in names]
    if not hasattr(modules[2 if make is plain else 0], "_get_padding_mask"):
        pytest.skip("this vLLM routes rows of padding, too")
    context = SimpleNamespace(is_padding=torch.arange(TOKENS) >= 3)
    for module in modules:
        monkeypatch.setattr(module, "is_forward_context_available", lambda: True, raising=False)
        monkeypatch.setattr(module, "get_forward_context", lambda: context, raising=False)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    routers = [make()]
    if hasattr(routers[0], "skip_padding"):
        routers.append(make(skip_padding=True))
    for router in routers:
        weights, ids = route(router)
        assert ids[3:].eq(-1).all() == getattr(router, "skip_padding", make is not grouped)
        assert ids[:3].ge(0).all()
        with patched(POINT, kernel := kernel_of()):
            found = route(router)
        assert sum(kernel.book.calls.values()) == 1
        assert torch.equal(found[1], ids)
        torch.testing.assert_close(found[0][:3], weights[:3])


@feature("more replicas of an expert (EPLB), the capture of routed experts", "right", POINT)
@pytest.mark.parametrize("make", [grouped, biased, plain])
def test_what_comes_after_the_choice_is_the_engines(
    make: Any, engines: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EPLB's map runs in Triton: a double has each expert's replica 100 places on."""
    base, mapped = home("base_router"), "eplb_map_to_physical_and_record"
    monkeypatch.setattr(base, mapped, lambda topk_ids, **_: topk_ids + 100)
    monkeypatch.setattr(base, "dbo_current_ubatch_id", lambda: 0)
    names = ("expert_load_view", "logical_to_physical_map", "logical_replica_count")
    known = dict.fromkeys((*names, "should_record_tensor"), torch.ones(1))
    router, logits, seen = make(), logits_of(), list[torch.Tensor]()
    router.global_num_experts += 3
    router.eplb_state = SimpleNamespace(**known, num_unpadded_tokens_tensors=[torch.ones(1)])
    router.set_capture_fn(lambda ids: seen.append(ids.clone()))
    expected = router._select_experts(logits, logits, torch.int64)[1]
    with patched(POINT, kernel := kernel_of()) as point:
        assert point.applies(layer_of(router)) is None
        found = router._select_experts(logits, logits, torch.int64)[1]
    assert sum(kernel.book.calls.values()) == 1
    assert found.dtype is torch.int64
    assert torch.equal(found.sort(1).values, expected.sort(1).values)
    assert torch.equal(seen[-1] + 100, found)


@feature("other scores, other routers, experts that route by themselves", "falls back", POINT)
def test_routers_that_the_op_does_not_describe_have_a_reason(engines: list[int]) -> None:
    refused = {
        "routing by object": object(),
        "the routing of router.topk": plain(scoring_func="softmax"),
        "scores by sqrtsoftplus": biased(scoring_func="sqrtsoftplus"),
        "shared experts among those of the router": biased(num_fused_shared_experts=1),
        "experts by the token's id": biased(hash_indices_table=torch.zeros(7, TOP_K)),
        "experts that make no groups": grouped(num_expert_group=5),
        "groups with fewer experts than it chooses": grouped(top_k=9),
    }
    if hasattr(biased(), "bias_vl"):
        refused["another bias for images"] = biased(bias_vl=BIAS)
    layers = [layer_of(each) for each in (grouped(), biased(), plain(), *refused.values())]
    alone = layer_of(grouped(), alone=True)
    kernel = kernel_of()
    with patched(POINT, kernel) as point:
        seen = survey(point, kernel.guards, [*layers, alone])
        reasons = {"experts that route by themselves": 1, **dict.fromkeys(refused, 1)}
        assert (seen.taken, dict(seen.refused)) == (3, reasons)
        engines.clear()
        shared = biased(num_fused_shared_experts=1)
        assert route(shared)[1].shape == (TOKENS, TOP_K + 1)
        assert engines == [TOKENS]
        assert not kernel.book.calls


@feature("a layer that computes something else", "falls back", POINT)
@pytest.mark.parametrize("make", [grouped, biased])
def test_a_router_that_fails_its_trial_stays_with_the_engine(
    make: Any, engines: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial has the router's own bias: here the engine leaves out the half of it."""
    name = "grouped_topk" if make is grouped else "fused_topk_bias"
    module = home(f"{name}_router")
    own = getattr(module, name)

    def other(**arguments: Any) -> Any:
        bias = arguments["e_score_correction_bias"]
        half = torch.cat([bias[: EXPERTS // 2], torch.zeros(EXPERTS // 2)])
        return own(**arguments | {"e_score_correction_bias": half})

    router, kernel, without = make(), kernel_of(), make(torch.zeros(EXPERTS))
    monkeypatch.setattr(module, name, other)
    expected = route(router)
    with patched(POINT, kernel) as point:
        assert point.applies(layer_of(router)) == "it computes something else"
        assert same(route(router), expected)
        assert not kernel.book.calls
        assert point.applies(layer_of(without)) is None
        route(without)
        assert sum(kernel.book.calls.values()) == 1
