"""Experts in fp8 with block scales: the real vLLM's layers, a double for each CUDA kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_fp8 import BLOCK, ExpertsGpu
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT, OP = "experts.fp8_block", "moe_experts_fp8_block"
EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 96, 64
TYPES = {"T": torch.bfloat16, "Q": torch.float8_e4m3fn, "F": torch.float32, "I": torch.int32}
MOE = "vllm.model_executor.layers.fused_moe"
BACKENDS = {
    "TRITON": "triton_moe:TritonExperts",
    "DEEPGEMM": "triton_deep_gemm_moe:TritonOrDeepGemmExperts",
    "FLASHINFER_CUTLASS": "flashinfer_cutlass_moe:FlashInferExperts",
}
NAMES = map("model.layers.{}.mlp.experts".format, itertools.count())


@pytest.fixture
def gpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExpertsGpu]:
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe
    from vllm.v1.worker import workspace

    made = ExpertsGpu()
    made.put_in(monkeypatch)
    alignment = "get_mk_alignment_for_contiguous_layout"
    monkeypatch.setattr(deep_gemm_moe, alignment, lambda: [BLOCK, BLOCK])
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


def layer_of(backend: str = "TRITON", **settings: Any) -> Any:
    """As vLLM builds and loads it, with a backend that it would choose on a GPU."""
    from vllm.model_executor.layers.fused_moe import layer as layers
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    factory = getattr(layers, "FusedMoEFactory", None) or layers.FusedMoE
    chosen = Fp8MoeBackend[backend], sources.part(f"{MOE}.experts.{BACKENDS[backend]}")
    block = settings.pop("block", [BLOCK, BLOCK])
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
    sizes |= {"intermediate_size": INNER, "params_dtype": torch.bfloat16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "select_fp8_moe_backend", lambda **given: chosen)
        # on Hopper, DeepGEMM leaves scales of weights as they are
        unchanged = "transform_sf_into_required_layout"
        patch.setattr(fp8_utils, unchanged, lambda sf, **given: sf)
        layer = factory(
            quant_config=fp8.Fp8Config(True, "dynamic", weight_block_size=block),
            prefix=next(NAMES),
            **{**sizes, **settings},
        )
        seed, held = torch.Generator().manual_seed(1), layer.routed_experts
        for name, parameter in held.named_parameters():
            numbers = torch.rand(parameter.shape, generator=seed)
            shifted = (numbers + 0.1) / 4 if "scale" in name else 2 * numbers - 1
            parameter.data.copy_(shifted.to(parameter.dtype))
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
    """As far as fp8 between the matmuls lets them be."""
    error = (given.float() - expected.float()).norm() / expected.float().norm()
    assert 0 < error < 0.06


@feature("`enforce_eager`, mode NONE", "right", POINT)
@feature("compiled in pieces, and from the compile cache", "right", POINT)
@pytest.mark.parametrize(
    ("backend", "compiled"), [("TRITON", False), ("DEEPGEMM", False), ("TRITON", True)]
)
def test_layers_run_the_kernel_and_many_rows_the_engines_own(
    gpu: ExpertsGpu, config: Any, backend: str, compiled: bool
) -> None:
    layer = layer_of(backend)
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


@feature("rows of padding that experts skip", "right", POINT)
def test_rows_that_pad_a_batch_have_no_expert(
    gpu: ExpertsGpu, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import forward_context

    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    layer, dispatch = layer_of(), kernel()
    plain, real = run(layer, config, 5), forward_context.get_forward_context
    padding = torch.arange(5) >= 3

    def padded() -> Any:
        context = real()
        context.is_padding = padding
        return context

    for module in ("modular_kernel", "router.fused_topk_router"):
        if hasattr(sources.module(f"{MOE}.{module}"), "get_forward_context"):
            monkeypatch.setattr(sources.module(f"{MOE}.{module}"), "get_forward_context", padded)
    own = run(layer, config, 5)
    assert own[3:].isnan().all(), "vLLM was to leave these rows out"
    with patched(POINT, dispatch) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1
        given = run(layer, config, 5)
        assert sum(dispatch.book.calls.values()) == 1
    close(given[:3], plain[:3])
    assert given[3:].isfinite().all()


class Another:
    """Of a class that is not vLLM's own, and an activation."""

    value = "gelu"


KERNEL = "_quant_method.moe_kernel"
FOUND, SCALES = f"{KERNEL}.fused_experts", "_quant_method.moe_quant_config"
WAYS = f"{FOUND}.moe_config.moe_parallel_config"
RANKS, OTHERS = "experts shared by several ranks", "weights in another layout: "
PACKED = torch.zeros(EXPERTS, 2 * INNER, 1, dtype=torch.int32)
TURNED = torch.zeros(EXPERTS, INNER, HIDDEN).to(torch.float8_e4m3fn).transpose(1, 2)
W1, W2 = f"float8_e4m3fn [4, {2 * INNER}, {HIDDEN}]", f"float8_e4m3fn [4, {HIDDEN}, {INNER}]"
EPLB = "experts of EPLB, data parallelism, all2all, Marlin or FlashInfer"
ODD, LAYOUT = "another layout, precision or activation", "weights or scales in another layout"
ROUTING = "other scores, other routers, experts that route by themselves"
REFUSALS: list[tuple[str, str, Any, str]] = [
    (EPLB, f"{WAYS}.enable_eplb", True, "experts that move between ranks"),
    ("", f"{KERNEL}.impl.prepare_finalize", Another(), "rows by Another"),
    ("expert parallelism", f"{WAYS}.use_ep", True, RANKS),
    ("", "routed_experts._expert_map", torch.arange(EXPERTS), RANKS),
    ("LoRA on experts", f"{FOUND}.moe_config.is_lora_enabled", True, "LoRA"),
    ("", f"{FOUND}._lora_context", 1, "LoRA"),
    ("", f"{FOUND}.post_gemm2_hook", print, "a sum that the model fuses"),
    ("", "routed_experts.global_num_experts", 5, "experts fused with shared ones"),
    ("", "routed_experts.apply_router_weight_on_input", True, "gains that scale x"),
    (ROUTING, "router", Another(), "routing by Another"),
    ("", "router._hash_indices_table", PACKED, "routing by a table of tokens"),
    ("", f"{SCALES}._w1.bias", PACKED, "biases"),
    ("", f"{SCALES}.gemm1_clamp_limit", 7.0, "a bounded activation"),
    (ODD, "routed_experts.activation", Another(), "activation gelu"),
    (
        LAYOUT,
        f"{SCALES}._w1.scale",
        PACKED,
        f"{OTHERS}{W1}, int32 [4, {2 * INNER}, 1], {W2}, float32 [4, 3, 2]",
    ),
    (
        "",
        "routed_experts.w2_weight",
        TURNED,
        f"{OTHERS}{W1}, float32 [4, 4, 3], {W2}, float32 [4, 3, 2]",
    ),
]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        pytest.param(*rest, marks=feature(name, "falls back", POINT) if name else ())
        for name, *rest in REFUSALS
    ],
)
def test_a_layer_that_the_op_does_not_describe_has_a_reason(
    gpu: ExpertsGpu, path: str, value: Any, reason: str
) -> None:
    owner, dispatch = (layer := layer_of()), kernel()
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    with patched(POINT, dispatch) as point:
        assert point.applies(layer) is None
        vars(owner)[name] = value  # some classes are frozen, some are modules
        assert dict(survey(point, dispatch.guards, [layer]).refused) == {reason: 1}
        assert not point._taken


def test_experts_by_flashinfer_or_none_and_oblong_blocks_have_a_reason(gpu: ExpertsGpu) -> None:
    flashinfer, oblong = layer_of("FLASHINFER_CUTLASS"), layer_of(block=[32, 16])
    unloaded = layer_of()
    unloaded._quant_method.moe_kernel = None
    dispatch = kernel()
    with patched(POINT, dispatch) as point:
        assert dict(survey(point, dispatch.guards, [flashinfer, oblong, unloaded]).refused) == {
            "experts by FlashInferExperts": 1,
            "blocks that are no squares of a multiple of 32": 1,
            "experts by Fp8MoEMethod": 1,
        }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expert_map": torch.arange(EXPERTS)}, "experts shared by several ranks"),
        ({"apply_router_weight_on_input": True}, "gains that scale x"),
        ({"global_num_experts": 9}, "experts fused with shared ones"),
        ({"topk_ids": torch.tensor([[1], [2]])}, "dtype bfloat16/float8_e4m3fn/float32/int64"),
    ],
)
def test_a_call_that_differs_is_the_engines_and_counted(
    gpu: ExpertsGpu, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
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
    "change", [lambda scale: scale.roll(1, 0), lambda scale: scale * 1.25, lambda scale: 0 * scale]
)
def test_a_layer_that_fails_its_trial_stays_with_the_engine(
    gpu: ExpertsGpu, config: Any, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    layer, dispatch = layer_of(), kernel()
    gpu.change = change
    expected = run(layer, config, 3)
    with patched(POINT, dispatch) as point:
        for _ in range(2):
            seen = survey(point, dispatch.guards, [layer])
            assert dict(seen.refused) == {"it computes something else": 1}
        assert torch.equal(run(layer, config, 3), expected)
        assert not dispatch.book.calls
        gpu.change = torch.Tensor.clone
        assert survey(point, dispatch.guards, [layer]).taken == 1


def test_one_expert_is_tried_too(gpu: ExpertsGpu) -> None:
    layer = layer_of(num_experts=1, top_k=1)
    with patched(POINT, kernel()) as point:
        assert point.applies(layer) is None
        gpu.change = lambda scale: scale.flip(0)
        assert point.applies(layer) == "it computes something else"


@feature("new weights: in place, `.data`, a new Parameter", "right", POINT)
def test_new_weights_are_the_ones_that_are_read(gpu: ExpertsGpu, config: Any) -> None:
    layer, dispatch = layer_of(), kernel()
    held = layer.routed_experts
    with patched(POINT, dispatch) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1
        before = run(layer, config, 3)
        held.w2_weight.data.copy_(held.w2_weight.data.flip(0))
        held.w13_weight.data = held.w13_weight.data.flip(0).contiguous()
        after = run(layer, config, 3)
        method = held.quant_method
        method.process_weights_after_loading(held)  # a new kernel object, as after a reload
        own = run(layer, config, 3)
        close(after, own)
        assert not torch.equal(after, before)
        assert sum(dispatch.book.calls.values()) == 2
        assert survey(point, dispatch.guards, [layer]).taken == 1
        assert torch.equal(run(layer, config, 3), after)


@feature("shared experts", "right", POINT)
def test_shared_experts_are_added_as_before(gpu: ExpertsGpu, config: Any) -> None:
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


@feature("weights offloaded: prefetch, or without UVA", "falls back", POINT)
@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_offloaded_weights_are_not_tried_and_batch_invariance_is_kept(
    gpu: ExpertsGpu, monkeypatch: pytest.MonkeyPatch
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
