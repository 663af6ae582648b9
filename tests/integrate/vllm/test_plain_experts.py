"""Experts without a quantisation: the real vLLM's layers, a double for each CUDA kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_fp8 import ExpertsGpu
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT, OP = "experts.plain", "moe_experts"
EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 96, 64
TYPES = {"T": torch.bfloat16, "S": torch.float32, "I": torch.int32}
MOE = "vllm.model_executor.layers.fused_moe"
NAMES = map("model.layers.{}.mlp.plain_experts".format, itertools.count())


class PlainGpu(ExpertsGpu):
    """In the place of vLLM's Triton matmul without scales; `change` is of a weight."""

    def triton(
        self,
        a: Any,
        b: Any,
        c: Any,
        a_scale: Any,
        b_scale: Any,
        gains: Any,
        *rest: Any,
        **more: Any,
    ) -> None:
        assert a_scale is None
        assert b_scale is None
        _, ids, _, weighted, top_k = rest[:5]
        rows, weight = c.view(len(ids), -1), self.change(b).float()
        if top_k > 1:
            self.rows.append(len(a))
        for gate, expert in enumerate(ids.tolist()):
            found = weight[expert] @ a[gate // top_k].float()
            rows[gate] = found * gains.flatten()[gate] if weighted else found

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        places = ("experts.triton_moe", "prepare_finalize.no_dp_ep")
        modules = [sources.module(f"{MOE}.{name}") for name in places]
        own = [module.moe_kernel_quantize_input for module in modules]
        super().put_in(patch)
        for module, function in zip(modules, own, strict=True):  # it quantises nothing
            patch.setattr(module, "moe_kernel_quantize_input", function)


@pytest.fixture
def gpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainGpu]:
    from vllm.v1.worker import workspace

    made = PlainGpu()
    made.put_in(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(torch.device("cpu"))
    yield made
    workspace.reset_workspace_manager()
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    made.library._destroy()


def kernel() -> Dispatcher:
    made = shipped(OP, **TYPES)
    axes = bench.load_op(OP).contract.guards.axes.items()
    served = {axis: AxisBounds(it.minimum, it.maximum, it.multiple_of) for axis, it in axes}
    made.guards = replace(made.guards, axes=served)
    return made


def layer_of(**settings: Any) -> Any:
    """As vLLM builds and loads it, with the backend that it chooses on Hopper."""
    from vllm.model_executor.layers.fused_moe import layer as layers
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    factory = getattr(layers, "FusedMoEFactory", None) or layers.FusedMoE
    chosen = UnquantizedMoeBackend.TRITON, sources.part(f"{MOE}.experts.triton_moe:TritonExperts")
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
    sizes |= {"intermediate_size": INNER, "params_dtype": torch.bfloat16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "select_unquantized_moe_backend", lambda **given: chosen)
        layer = factory(prefix=next(NAMES), **{**sizes, **settings})
        seed, held = torch.Generator().manual_seed(1), layer.routed_experts
        for parameter in held.parameters():
            numbers = torch.randn(parameter.shape, generator=seed) / parameter.shape[-1] ** 0.5
            parameter.data.copy_(2 * numbers)
        held.quant_method.process_weights_after_loading(held)
    return layer


def run(layer: Any, config: Any, count: int, compiled: Any = None) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    seed = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=seed).bfloat16()
    logits = torch.randn(count, EXPERTS, generator=seed).bfloat16()
    with set_forward_context(None, config), torch.no_grad():
        result: torch.Tensor = (layer if compiled is None else compiled)(x, logits)
    return result


def close(given: torch.Tensor, expected: torch.Tensor) -> None:
    """As far as bfloat16 between the matmuls lets them be."""
    error = (given.float() - expected.float()).norm() / expected.float().norm()
    assert 0 < error < 0.01


@feature("`enforce_eager`, mode NONE", "right", POINT)
@feature("compiled in pieces, and from the compile cache", "right", POINT)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_run_the_kernel_and_many_rows_the_engines_own(
    gpu: PlainGpu, config: Any, compiled: bool
) -> None:
    layer = layer_of()
    few, many = run(layer, config, 3), run(layer, config, 70)
    call = torch.compile(layer, fullgraph=True, dynamic=True) if compiled else layer
    dispatch = kernel()
    with patched(POINT, dispatch) as point:
        assert survey(point, dispatch.guards, [layer, torch.nn.Linear(2, 2)]).total == 1
        assert survey(point, dispatch.guards, [layer]).taken == 1
        gpu.rows.clear()
        given = run(layer, config, 3, call)
        assert not gpu.rows
        close(given, few)
        assert torch.equal(run(layer, config, 3, call), given)
        assert torch.equal(run(layer, config, 70, call), many)
        assert gpu.rows == [70]
        assert sum(dispatch.book.calls.values()) == 2
        assert dict(dispatch.book.fallbacks) == {"tokens above 64": 1}
    assert torch.equal(run(layer, config, 3), few)
    with patched(POINT, dispatch := kernel()):  # no layer was looked at
        assert torch.equal(run(layer, config, 3), few)
        assert not dispatch.book.calls


class Another:
    """Of a class that is not vLLM's own, and an activation."""

    value = "gelu"


KERNEL = "_quant_method.moe_kernel"
FOUND, SCALES = f"{KERNEL}.fused_experts", "_quant_method.moe_quant_config"
WAYS = f"{FOUND}.moe_config.moe_parallel_config"
RANKS, OTHERS = "experts shared by several ranks", "weights in another layout: "
PACKED = torch.zeros(EXPERTS, 2 * INNER, 1, dtype=torch.int32)
TURNED = torch.zeros(EXPERTS, INNER, HIDDEN, dtype=torch.bfloat16).transpose(1, 2)
W1, W2 = f"bfloat16 [4, {2 * INNER}, {HIDDEN}]", f"bfloat16 [4, {HIDDEN}, {INNER}]"
REFUSALS: list[tuple[str, str, Any, str]] = [
    (
        "experts of EPLB, data parallelism, all2all, Marlin or FlashInfer",
        f"{WAYS}.enable_eplb",
        True,
        "experts that move between ranks",
    ),
    ("", f"{KERNEL}.impl.prepare_finalize", Another(), "rows by Another"),
    ("expert parallelism", f"{WAYS}.use_ep", True, RANKS),
    ("", "routed_experts._expert_map", torch.arange(EXPERTS), RANKS),
    ("LoRA on experts", f"{FOUND}.moe_config.is_lora_enabled", True, "LoRA"),
    ("", f"{FOUND}._lora_context", 1, "LoRA"),
    ("", f"{FOUND}.post_gemm2_hook", print, "a sum that the model fuses"),
    ("", "routed_experts.global_num_experts", 5, "experts fused with shared ones"),
    ("", "routed_experts.apply_router_weight_on_input", True, "gains that scale x"),
    ("", "router", Another(), "routing by Another"),
    ("", f"{SCALES}._w1.bias", PACKED, "biases"),
    ("", f"{SCALES}.gemm1_clamp_limit", 7.0, "a bounded activation"),
    ("", "routed_experts.activation", Another(), "activation gelu"),
    ("", f"{SCALES}._w1.scale", PACKED, "quantised weights"),
    ("", "routed_experts.w2_weight", TURNED, f"{OTHERS}{W1}, {W2}"),
    ("", "routed_experts.w13_weight", PACKED, f"{OTHERS}int32 [4, {2 * INNER}, 1], {W2}"),
    ("", KERNEL, None, "experts by UnquantizedFusedMoEMethod"),
]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        pytest.param(*rest, marks=feature(name, "falls back", POINT) if name else ())
        for name, *rest in REFUSALS
    ],
)
def test_a_layer_that_the_op_does_not_describe_has_a_reason(
    gpu: PlainGpu, path: str, value: Any, reason: str
) -> None:
    owner, dispatch = (layer := layer_of()), kernel()
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    with patched(POINT, dispatch) as point:
        assert point.applies(layer) is None
        point._taken.clear()
        vars(owner)[name] = value  # some classes are frozen, some are modules
        assert dict(survey(point, dispatch.guards, [layer]).refused) == {reason: 1}
        assert not point._taken


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expert_map": torch.arange(EXPERTS)}, "experts shared by several ranks"),
        ({"apply_router_weight_on_input": True}, "gains that scale x"),
        ({"global_num_experts": 9}, "experts fused with shared ones"),
        ({"topk_ids": torch.tensor([[1], [2]])}, "dtype bfloat16/float32/int64"),
    ],
)
def test_a_call_that_differs_is_the_engines_and_counted(
    gpu: PlainGpu, changes: dict[str, Any], reason: str
) -> None:
    layer, dispatch = layer_of(top_k=1), kernel()
    held, own = layer.routed_experts, layer._quant_method.moe_kernel
    given = {
        "hidden_states": torch.randn(2, HIDDEN).bfloat16(),
        "w1": held.w13_weight,
        "w2": held.w2_weight,
        "topk_weights": torch.tensor([[0.5], [0.25]]),
        "topk_ids": torch.tensor([[1], [2]], dtype=torch.int32),
        "activation": held.activation,
        "global_num_experts": EXPERTS,
        "expert_map": None,
        "apply_router_weight_on_input": False,
        **changes,
    }
    expected = own.apply(**given)
    with patched(POINT, dispatch) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1
        assert torch.equal(own.apply(**given), expected)
        assert dict(dispatch.book.fallbacks) == {reason: 1}
        assert not dispatch.book.calls


@feature("a layer that computes something else", "falls back", POINT)
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.roll(1, 1),
        lambda weight: weight.roll(1, 0),
        lambda weight: weight * 1.1,
        lambda weight: torch.cat(weight.chunk(2, 1)[::-1], 1),
    ],
)
def test_a_layer_that_fails_its_trial_stays_with_the_engine(
    gpu: PlainGpu, config: Any, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    layer, dispatch = layer_of(), kernel()
    gpu.change = change
    expected = run(layer, config, 3)
    with patched(POINT, dispatch) as point:
        seen = survey(point, dispatch.guards, [layer])
        assert dict(seen.refused) == {"it computes something else": 1}
        assert torch.equal(run(layer, config, 3), expected)
        assert not dispatch.book.calls
        gpu.change = torch.Tensor.clone
        assert survey(point, dispatch.guards, [layer]).taken == 1


@feature("new weights: in place, `.data`, a new Parameter", "right", POINT)
def test_new_weights_are_the_ones_that_are_read(gpu: PlainGpu, config: Any) -> None:
    layer, dispatch = layer_of(), kernel()
    held = layer.routed_experts
    with patched(POINT, dispatch) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1
        before = run(layer, config, 3)
        held.w2_weight.data.copy_(held.w2_weight.data.flip(0))
        held.w13_weight.data = held.w13_weight.data.flip(0).contiguous()
        after = run(layer, config, 3)
        assert sum(dispatch.book.calls.values()) == 2
        assert not torch.equal(after, before)
    close(after, run(layer, config, 3))


@feature("shared experts", "right", POINT)
def test_shared_experts_are_added_as_before(gpu: PlainGpu, config: Any) -> None:
    layer = layer_of(shared_experts=Thrice())
    own = run(layer, config, 3)
    with patched(POINT, dispatch := kernel()) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1
        given = run(layer, config, 3)
        assert sum(dispatch.book.calls.values()) == 1
    close(given, own)


class Thrice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_it_and_the_point_of_fp8_experts_exclude_each_other(gpu: PlainGpu) -> None:
    for one, other in ((POINT, "experts.fp8_block"), ("experts.fp8_block", POINT)):
        with (
            patched(one, shipped(POINTS[one].op)),
            pytest.raises(bench.VerificationError, match=r"FusedMoEKernel\.apply"),
        ):
            POINTS[other]().find()


@feature("weights offloaded: prefetch, or without UVA", "falls back", POINT)
@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_offloaded_weights_are_not_tried_and_batch_invariance_is_kept(
    gpu: PlainGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, real, point = layer_of(), sources.module, POINTS[POINT]()
    doubles = {
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cuda=lambda: True)),
        "vllm.envs": SimpleNamespace(VLLM_BATCH_INVARIANT=True),
    }
    monkeypatch.setattr(sources, "module", lambda name: doubles.get(name) or real(name))
    assert point.applies(layer) == "offloaded weights"
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        point.find()
