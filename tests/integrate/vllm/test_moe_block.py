"""Norm, router, experts and norm in one call, in graphs that the real vLLM splits, on the CPU."""

from __future__ import annotations

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
from vllm_here import attribute, config, dispatcher, guards_of, needs_vllm, patched, shipped
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


def matmul_ogs(x, w, bias, data, **more):  # type: ignore[no-untyped-def]
    """The library's, in plain PyTorch."""
    gather, scatter, y = more.get("gather_indx"), more.get("scatter_indx"), more["y"]
    rows = x if gather is None else x[gather.src_indx.long() // TOP_K]
    expert = torch.repeat_interleave(torch.arange(N_EXPERTS), data.expt_hist.long())
    found = torch.einsum("rh,rhk->rk", rows.float(), w.numbers[expert]) + bias[expert]
    if gather is not None:
        alpha, limit = more["fused_activation"].fn_args
        gate, up = found[:, ::2].clamp(max=limit), found[:, 1::2].clamp(-limit, limit)
        y[0] = gate * torch.sigmoid(alpha * gate) * (up + 1)
        return
    found = found * more["gammas"].float()[:, None]
    y[0] = found[scatter.src_indx.long().view(-1, TOP_K)].sum(1)


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
