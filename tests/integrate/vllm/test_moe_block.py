"""Norm, router, experts and norm in one call, in graphs that the real vLLM splits, on the CPU."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_experts
from feature_matrix import feature
from patch_sample import kernel as add_norm
from vllm_experts import TOKENS, TOP_K, Kernel, gpt_oss, reduce_add_norm
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
from vllm_sample import EXPERTS, packed

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpt_oss")  # fixtures of tests here

pytestmark = needs_vllm

POINT, N_EXPERTS, HIDDEN, INNER = "moe_block", 4, 64, 64
ALL = {
    **dict.fromkeys("TWXS", torch.bfloat16),
    **{"U": torch.uint8, "B": torch.float32, "I": torch.int32},
}
NEAR = {"rtol": 0.02, "atol": 0.05}


def block(  # type: ignore[no-untyped-def]
    *given, alpha: float = 0, limit: float = 0, epsilon: float = 0
):
    """The contract in plain PyTorch, of the weights as they lie in memory."""
    x, residual, weight, router, bias, up, up_scales, up_bias, *rest = given
    down, down_scales, down_bias, next_weight, logits, chosen, total, output, *scalars = rest
    alpha, limit, epsilon = scalars
    layout = runpy.run_path(str(bench.load_op("moe_matmul_swiglu").folder / "reference.py"))
    table = layout["numbers"]("cpu")
    first, second = (
        torch.stack(
            [layout["dequantised"](w, s, layout["laid_out"](n, k, "cpu"), table) for w, s in both]
        )
        for both, n, k in (
            (zip(up, up_scales, strict=True), up_bias.shape[1], x.shape[1]),
            (zip(down, down_scales, strict=True), x.shape[1], up_bias.shape[1] // 2),
        )
    )
    x, summed = x.clone(), residual.clone()
    add_norm(x, summed, weight, epsilon)
    logits.copy_(torch.nn.functional.linear(x, router, bias))
    chosen.copy_(logits.topk(chosen.shape[1]).indices.sort(1).values)
    index = chosen.long()
    gates = logits.gather(1, index).float().softmax(1)
    u = torch.einsum("tknh,th->tkn", first[index], x.float()) + up_bias[index]
    gate, other = u[..., ::2].clamp(max=limit), u[..., 1::2].clamp(-limit, limit)
    a = (gate * torch.sigmoid(alpha * gate) * (other + 1)).bfloat16().float()
    y = torch.einsum("tkni,tki->tkn", second[index], a) + down_bias[index]
    output.copy_((y * gates[..., None]).sum(1))
    total.copy_(summed)
    add_norm(output, total, next_weight, epsilon)


def dispatching() -> Dispatcher:
    guards = guards_of(POINT, **ALL)
    return dispatcher(POINT, block, replace(guards, axes={"tokens": AxisBounds(maximum=64)}))


def other(point: str) -> Dispatcher:
    """A plain kernel of another point."""
    op = POINTS[point].op
    kernels = {"fused_add_rms_norm": add_norm, "reduce_add_rms_norm": reduce_add_norm}
    if op not in kernels:
        return shipped(op, *((("epsilon", float),) if "norm" in op else ()), **ALL)
    guards = replace(guards_of(op, **ALL), scalars=(("epsilon", float),))
    return dispatcher(op, kernels[op], guards)


def calls(kernel: Dispatcher) -> int:
    return sum(kernel.book.calls.values())


def run(config: Any, forward: Any, tokens: int = TOKENS) -> Any:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config):
        return forward(torch.arange(tokens) % 50, (torch.arange(tokens) / 7).bfloat16())


def compiled(forward: Any, backend: str = "eager") -> Any:
    """Split as vLLM splits, and compiled by that backend."""
    from torch._dynamo import lookup_backend
    from vllm.compilation import backends

    def split(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backends.split_graph(graph, ["vllm::unified_attention_with_output"])
        return lookup_backend(backend)(graph, inputs)

    return torch.compile(forward, fullgraph=True, backend=split, dynamic=True)


def weigh(experts: Any, seed: int) -> None:
    """New weights of a layer of experts, as vLLM holds them on compute capability 9.0."""
    precision = attribute("triton_kernels.matmul_ogs:PrecisionConfig")
    held, given = experts.routed_experts, experts.method.moe_kernel.fused_experts
    held.w13_weight, scale1, held.w13_weight.numbers = packed(N_EXPERTS, 2 * INNER, HIDDEN, seed)
    held.w2_weight, scale2, held.w2_weight.numbers = packed(N_EXPERTS, HIDDEN, INNER, seed + 1)
    biases = (torch.randn(N_EXPERTS, n) * 3 for n in (2 * INNER, HIDDEN))
    w1_bias, w2_bias = (torch.nn.Parameter(bias, requires_grad=False) for bias in biases)
    w1, w2 = precision(weight_scale=scale1), precision(weight_scale=scale2)
    given.quant_config = SimpleNamespace(
        w1_bias=w1_bias, w2_bias=w2_bias, w1_precision=w1, w2_precision=w2
    )


def matmul_ogs(*given: Any, **more: Any) -> None:
    """The library's, in plain PyTorch, up to its sum."""
    library = sources.module("triton_kernels.matmul_ogs")
    call = inspect.signature(library.matmul_ogs).bind(*given, **more)
    call.apply_defaults()
    x, w, bias, data, gather, scatter, *_ = call.args
    y, activation = call.arguments["y"], call.arguments["fused_activation"]
    rows = x if gather is None else x[gather.src_indx.long() // TOP_K]
    expert = torch.repeat_interleave(torch.arange(N_EXPERTS), data.expt_hist.long())
    found = torch.einsum("rh,rhk->rk", rows.float(), w.numbers[expert]) + bias[expert]
    if gather is not None:
        alpha, limit = activation.fn_args
        gate, up = found[:, ::2].clamp(max=limit), found[:, 1::2].clamp(-limit, limit)
        y[0] = gate * torch.sigmoid(alpha * gate) * (up + 1)
        return
    found = (found * call.arguments["gammas"].float()[:, None]).to(y.dtype)
    plain = library.FusedActivation(), library.Epilogue(library.FnSpecs.default())
    index = scatter.src_indx.view(-1, TOP_K)
    more = {"x_mx_scale": None, "out_dtype": y.dtype}
    library.reduce_grouped(found[None, None], index, y, None, *plain, **more)


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of vLLM's routing; what needs a GPU runs in PyTorch here."""
    from patcher.integrate.vllm.roles.router import new_tables, routed

    route, found = shipped("moe_route", T=torch.bfloat16, I=torch.int32), []

    def routing(logits: Any, top_k: int, sm_first: bool = False, *more: Any) -> Any:
        found.append(len(logits))
        tables = new_tables(logits, top_k)
        assert route(logits, *tables)
        return routed(tables, logits.shape[1], top_k)

    def summing(x: Any, index: Any, out: Any, *rest: Any, **more: Any) -> Any:
        out[0] = x[0, 0][index.long()].sum(1)
        return out, None

    flags = attribute("triton_kernels.matmul_ogs_details.opt_flags:make_opt_flags").__globals__
    monkeypatch.setitem(flags["_opt_flags_constraints"], "split_k", 1)
    monkeypatch.setattr(sources.module("triton_kernels.routing"), "routing", routing)
    monkeypatch.setattr(sources.module("triton_kernels.matmul_ogs"), "reduce_grouped", summing)
    monkeypatch.setattr(sources.module(EXPERTS), "matmul_ogs", matmul_ogs)
    for point in (POINT, *BESIDE):
        monkeypatch.setattr(POINTS[point], "find", lambda self: "")
    monkeypatch.setattr(vllm_experts, "HIDDEN", HIDDEN)
    return found


@pytest.fixture
def model(routings: list[int], gpt_oss: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpt-oss whose layers run vLLM's own experts on MXFP4 weights."""
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    made = gpt_oss().bfloat16()
    monkeypatch.setattr(type(made.layers[0].mlp.experts), "_forward_impl", MoERunner._forward_impl)
    torch.manual_seed(5)
    for seed, layer in enumerate(made.layers):
        layer.mlp.experts.method.moe_kernel = Kernel("OAITritonMxfp4ExpertsMonolithic")
        of_layer(layer.mlp.experts, FusedMoERouter)
        weigh(layer.mlp.experts, 10 * seed)
    return made


def of_layer(experts: Any, router: Any) -> None:
    """What vLLM's own `_forward_impl` asks of a layer."""
    held, method = experts.routed_experts, experts.method
    given = method.moe_kernel.fused_experts
    given.topk, given.renormalize = TOP_K, True
    method.is_monolithic = method.supports_internal_mk = True
    experts.router = object.__new__(
        type("Router", (router,), dict.fromkeys(router.__abstractmethods__))
    )
    held.quant_method, held.apply_router_weight_on_input = method, False
    held._ensure_moe_quant_config_init = lambda: None

    def forward(x: Any, router_logits: Any, input_ids: Any) -> Any:
        weights = held.w13_weight, held.w2_weight
        return given.apply(
            x, *weights, router_logits, None, N_EXPERTS, held.expert_map, None, False
        )

    held.forward_monolithic = forward


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
            torch.testing.assert_close(run(config, forward), expected, **NEAR)
        assert not routings
        assert calls(kernel) == 4
        assert not kernel.book.fallbacks
        # more than the kernel may be given: the engine's own four
        torch.testing.assert_close(run(config, forward, 65), many, **NEAR)
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
        torch.testing.assert_close(run(config, forward), expected, **NEAR)
        assert not routings
        assert {name: calls(kernel) for name, kernel in kernels.items()} == {
            **dict.fromkeys(names, 0),
            POINT: 2,
        }
        torch.testing.assert_close(run(config, forward, 65), many, **NEAR)
        assert {name: calls(kernels[name]) for name in names} == {n: BESIDE[n] for n in names}
        assert dict(kernels[POINT].book.fallbacks) == {"tokens above 64": 2}


def test_what_it_leaves_is_fused_by_the_points_of_its_parts(config: Any, model: Any) -> None:
    """In the order of the layers' calls, of which the fused one is the first."""
    _read(model)
    model.layers[1].mlp.experts.moe_config.experts_per_token = TOP_K
    expected = run(config, model.forward)
    names = "add_norm", "add_norm_route", "experts_to_norm"
    kernels = {name: other(name) for name in (*names, "experts.sum.oai")}
    kernel = dispatching()
    with ExitStack() as stack:
        for name, made in (*kernels.items(), (POINT, kernel)):
            stack.enter_context(patched(name, made))
        torch.testing.assert_close(run(config, compiled(model.forward)), expected, **NEAR)
    found = {name: calls(made) for name, made in kernels.items()}
    assert found == {"add_norm": 1, "add_norm_route": 1, "experts_to_norm": 0, "experts.sum.oai": 1}
    assert calls(kernel) == 1


def _hooked_router(model: Any) -> None:
    model.layers[0].mlp.router.register_forward_hook(lambda layer, given, out: out * 2)


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
    given = model.layers[0].mlp.experts.method.moe_kernel.fused_experts.quant_config
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
        torch.testing.assert_close(run(config, compiled(model.forward)), expected, **NEAR)
    assert calls(kernel) == 1
    assert dict(kernel.book.fallbacks) == {reason: 1}


@feature("`enforce_eager`, mode NONE", "falls back", POINT)
def test_a_model_that_is_not_compiled_keeps_its_own_and_says_so(config: Any, model: Any) -> None:
    expected, kernel = run(config, model.forward), dispatching()
    with patched(POINT, kernel):
        assert torch.equal(run(config, model.forward), expected)
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"not in a graph that vLLM compiles": 2}


@feature("new weights: in place, `.data`, a new Parameter", "right", POINT)
@feature("LoRA on experts", "falls back", POINT)
@feature("expert parallelism", "falls back", POINT)
def test_new_weights_count_and_a_layer_that_changed_is_the_engines(
    config: Any, model: Any, routings: list[int]
) -> None:
    first, second = model.layers
    old, kernel = run(config, model.forward), dispatching()
    with patched(POINT, kernel):
        forward = compiled(model.forward)
        torch.testing.assert_close(run(config, forward), old, **NEAR)
        quantised(first.mlp.experts).w2_bias.data.mul_(-2)
        weigh(second.mlp.experts, 77)
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
    torch.testing.assert_close(found, expected, **NEAR)
    torch.testing.assert_close(again, expected, **NEAR)
    assert not torch.allclose(found, old, **NEAR)
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
