"""Mixture-of-experts models of vLLM on the CPU, with doubles for what needs a GPU."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patch_sample import kernel as add_norm
from vllm_sample import EXPERTS, packed

from patcher.bench import load_op
from patcher.bench.runner.loading import load
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources

TOP_K, TOKENS, HIDDEN, N_EXPERTS = 2, 5, 32, 4
_MOE = "vllm.model_executor.layers.fused_moe"


class Kernel:
    """What a layer's method keeps of its experts."""

    def __init__(self, name: str) -> None:
        cls = sources.part(f"{EXPERTS}:{name}")
        self.fused_experts = cls.__new__(cls)

    def output_is_reduced(self) -> bool:
        return False


@pytest.fixture
def gpt_oss(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes gpt-oss models of vLLM's own classes, two layers deep, with doubles for what needs a
    GPU: attention, and the experts, which are linear maps. Those end as vLLM's do, in
    `reduce_grouped` (its double sums in PyTorch), or in a sum of their own.
    """
    import transformers
    from vllm import ir
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.model_executor.models import gpt_oss as engine

    class Attention(torch.nn.Module):
        def __init__(self, config: Any, **rest: Any) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.mix(hidden)
            return mixed + positions.unsqueeze(1)

    class Experts(moe_runner.MoERunner):  # type: ignore[misc]
        grouped, kind = True, "OAITritonMxfp4ExpertsMonolithic"

        def __init__(self, num_experts: int, hidden_size: int, prefix: str, **rest: Any) -> None:
            torch.nn.Module.__init__(self)
            sizes = dict.fromkeys(("tp_size", "ep_size", "dp_size", "pcp_size"), 1)
            sizes |= dict.fromkeys(("hidden_dim", "hidden_dim_unpadded"), hidden_size)
            flags = {"is_sequence_parallel": False, "skip_final_all_reduce": False}
            self.moe_config = SimpleNamespace(experts_per_token=TOP_K, **sizes, **flags)
            self.router = self.gate = self._shared_experts = None
            self.routed_input_transform = self.routed_output_transform = None
            self.routed_scaling_factor = 1.0
            self.layer_name = prefix
            # on a GPU, vLLM calls its operator
            self._forward_entry = torch.ops.vllm.moe_forward
            self.maps = torch.nn.Parameter(torch.empty(num_experts, hidden_size, hidden_size))
            self.routed_experts: Any = SimpleNamespace(expert_map=None)
            self.method = SimpleNamespace(
                skip_forward_padding=True,
                has_unpadded_output=False,
                moe_kernel=Kernel(self.kind),
            )
            moe_runner.register_layer_for_moe_forward_op(config, self)

        @property
        def _quant_method(self) -> Any:
            return self.method

        def _forward_impl(self, hidden: Any, logits: Any, *rest: Any) -> Any:
            scores, chosen = logits.topk(TOP_K)
            order = chosen.flatten().argsort(stable=True)
            maps = self.maps[chosen.flatten()[order]]
            rows = torch.einsum("rh,rhk->rk", hidden[order // TOP_K], maps)
            rows = rows * scores.softmax(-1).flatten()[order, None]
            index = order.argsort().view(-1, TOP_K).int()
            if not self.grouped:
                return rows[index.long()].sum(1)
            library = sys.modules["triton_kernels.matmul_ogs"]
            plain = library.FusedActivation(), library.Epilogue(library.FnSpecs.default())
            output = torch.full_like(hidden, torch.nan)
            more = {"x_mx_scale": None, "out_dtype": output.dtype}
            summed, _ = library.reduce_grouped(
                rows[None, None], index, output[None], None, *plain, **more
            )
            return summed[0]

    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 16, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 50}
    experts: dict[str, Any] = {"num_local_experts": N_EXPERTS, "num_experts_per_tok": TOP_K}
    model = transformers.GptOssConfig(**sizes, **experts)
    monkeypatch.setattr(engine.TransformerBlock, "attention_cls", Attention)
    factory = "FusedMoEFactory" if hasattr(engine, "FusedMoEFactory") else "FusedMoE"
    monkeypatch.setattr(engine, factory, Experts)

    def forget() -> None:
        config.compilation_config.static_forward_context.clear()
        config.compilation_config.static_all_moe_layers.clear()
        # counts of layers, which are in older versions' hash of compiled code
        config.compilation_config.enabled_custom_ops.clear()
        config.compilation_config.disabled_custom_ops.clear()

    def make(grouped: bool = False, kind: str = Experts.kind) -> Any:
        forget()
        Experts.grouped, Experts.kind = grouped, kind
        with monkeypatch.context() as known:
            known.setattr(config, "model_config", SimpleNamespace(hf_config=model))
            made = engine.GptOssModel(vllm_config=config)
        generator = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            parameter.data.normal_(0, 0.2, generator=generator)
        return made

    # as a worker sets it for a model that is compiled
    with ir.enable_torch_wrap(True):
        yield make
    forget()


def reduce_add_norm(rows, row_map, residual, weight, output, epsilon):  # type: ignore[no-untyped-def]
    """The contract of reduce_add_rms_norm in plain PyTorch."""
    some = (row_map >= 0).unsqueeze(-1)
    added = rows[row_map.clamp(min=0).long()].masked_fill(~some, 0.0).sum(1)
    output.copy_(added)
    add_norm(output, residual, weight, epsilon)


def compiled(forward: Any, backend: str = "eager") -> Any:
    """Split as vLLM splits, and compiled by that backend."""
    from torch._dynamo import lookup_backend
    from vllm.compilation import backends

    def split(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backends.split_graph(graph, ["vllm::unified_attention_with_output"])
        return lookup_backend(backend)(graph, inputs)

    return torch.compile(forward, fullgraph=True, backend=split, dynamic=True)


def calls(kernel: Dispatcher) -> int:
    return sum(kernel.book.calls.values())


def complete(experts: Any) -> None:
    """Give a layer of the fixture what vLLM's own `_forward_impl` asks of it."""
    router = sources.part(f"{_MOE}.router.fused_moe_router:FusedMoERouter")
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
        return given.apply(x, *weights, router_logits, None, N_EXPERTS, None, None, False)

    held.forward_monolithic = forward


def weigh(experts: Any, inner: int, seed: int) -> None:
    """New weights of a layer of experts, as vLLM holds them on compute capability 9.0."""
    precision = sources.part("triton_kernels.matmul_ogs:PrecisionConfig")
    held, given = experts.routed_experts, experts.method.moe_kernel.fused_experts
    hidden = experts.moe_config.hidden_dim
    held.w13_weight, scale1, held.w13_weight.numbers = packed(N_EXPERTS, 2 * inner, hidden, seed)
    held.w2_weight, scale2, held.w2_weight.numbers = packed(N_EXPERTS, hidden, inner, seed + 1)
    biases = (torch.randn(N_EXPERTS, n) * 3 for n in (2 * inner, hidden))
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


def routed_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let vLLM's routing and sum run in PyTorch.

    Returns:
        Tokens of each call of the routing.
    """
    from patcher.integrate.vllm.roles.router import new_tables, routed

    source = load_op("moe_route").folder / "solutions" / "cpu_torch" / "moe_route.py"
    route, found = load(str(source), "python", "moe_route"), list[int]()

    def routing(logits: Any, top_k: int, sm_first: bool = False, *more: Any) -> Any:
        found.append(len(logits))
        tables = new_tables(logits, top_k)
        route(logits, *tables)
        return routed(tables, logits.shape[1], top_k)

    def summing(x: Any, index: Any, out: Any, *rest: Any, **more: Any) -> Any:
        out[0] = x[0, 0][index.long()].sum(1)
        return out, None

    monkeypatch.setattr(sources.module("triton_kernels.routing"), "routing", routing)
    monkeypatch.setattr(sources.module("triton_kernels.matmul_ogs"), "reduce_grouped", summing)
    return found
