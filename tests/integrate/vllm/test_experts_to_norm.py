"""The sum over experts and the norm after it, in graphs that the real vLLM splits, on the CPU."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import kernel as add_norm
from vllm_experts import HIDDEN, TOKENS, TOP_K, Kernel, compiled, gpt_oss, reduce_add_norm
from vllm_here import config, dispatcher, guards_of, needs_vllm, nothing

from patcher import bench
from patcher.integrate.counts import CallSignature
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpt_oss")  # fixtures of tests here

pytestmark = needs_vllm

LABEL = f"reduce_add_rms_norm tokens={TOKENS} hidden={HIDDEN} top_k={TOP_K} spare=0 float32/int32"
SUM, POINT = "experts.sum.oai", "experts_to_norm"


def dispatching() -> Dispatcher:
    guards = guards_of("reduce_add_rms_norm", I=torch.int32, T=torch.float32, W=torch.float32)
    guards = replace(guards, scalars=(("epsilon", float),))
    return dispatcher("reduce_add_rms_norm", reduce_add_norm, guards)


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


def run(config: Any, forward: Any) -> Any:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config):
        return forward(torch.arange(TOKENS), torch.arange(TOKENS) / 7)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of vLLM's sum, which sums in PyTorch here."""
    library = sources.module("triton_kernels.matmul_ogs")
    found: list[int] = []

    def summing(x: Any, index: Any, out: Any, *rest: Any, **more: Any) -> Any:
        found.append(len(index))
        out[0] = (x[0, 0][index.long()] * (index >= 0).unsqueeze(-1)).sum(1)
        return out, None

    monkeypatch.setattr(library, "reduce_grouped", summing)
    monkeypatch.setattr(POINTS[POINT], "find", lambda self: "")
    monkeypatch.setattr(POINTS[SUM], "find", lambda self: "")
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("rows", [False, True])
def test_experts_and_the_norm_after_them_are_one_call(
    rows: bool, backend: str, config: Any, gpt_oss: Any, sums: list[int]
) -> None:
    model = gpt_oss(rows)
    expected = run(config, model.forward)
    assert sums == [TOKENS, TOKENS] * rows
    sums.clear()
    kernel = dispatching()
    with patched(kernel):
        forward = compiled(model.forward, backend)
        for _ in range(2):
            torch.testing.assert_close(run(config, forward), expected)
        assert not sums
        assert dict(kernel.book.calls) == {LABEL: 4}
        assert not kernel.book.fallbacks

        # what the kernel may not be given: the sum and the norm of the engine
        kernel._last, kernel._known = CallSignature("", None), {}
        kernel.guards = replace(kernel.guards, axes={"hidden": AxisBounds(maximum=16)})
        torch.testing.assert_close(run(config, forward), expected)
        assert sums == [TOKENS, TOKENS]
        [(reason, count)] = kernel.book.fallbacks.items()
        assert reason.startswith("hidden")
        assert count == 2
    assert torch.equal(run(config, model.forward), expected)


@feature("other points beside it", "right", "add_norm", "experts_to_norm", "experts.sum.oai")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("first", ["add_norm", POINT])
def test_it_is_fused_beside_the_point_of_the_norm_and_of_the_sum(
    first: str, backend: str, config: Any, gpt_oss: Any, sums: list[int]
) -> None:
    model = gpt_oss(True)
    expected = run(config, model.forward)
    sums.clear()
    guards = guards_of("fused_add_rms_norm", T=torch.float32, W=torch.float32)
    norms = dispatcher(
        "fused_add_rms_norm", add_norm, replace(guards, scalars=(("epsilon", float),))
    )
    dtypes = {"T": torch.float32, "S": torch.float32, "I": torch.int32}
    alone = dispatcher("moe_reduce", nothing, guards_of("moe_reduce", **dtypes))
    kernels = {"add_norm": norms, POINT: dispatching(), SUM: alone}
    second = POINT if first == "add_norm" else "add_norm"
    with (
        patched(kernels[first], first),
        patched(alone, SUM),
        patched(kernels[second], second),
    ):
        torch.testing.assert_close(run(config, compiled(model.forward, backend)), expected)
        assert dict(kernels[POINT].book.calls) == {LABEL: 2}
        assert sum(norms.book.calls.values()) == 2  # those after attention
        assert not any(kernel.book.fallbacks for kernel in kernels.values())
        assert not alone.book.calls
        assert not sums


@feature("new weights: in place, `.data`, a new Parameter", "right", POINT)
def test_new_weights_of_norms_and_experts_count(config: Any, gpt_oss: Any) -> None:
    model, kernel = gpt_oss(), dispatching()
    old = run(config, model.forward)
    with patched(kernel):
        forward = compiled(model.forward)
        torch.testing.assert_close(run(config, forward), old)
        first, second = model.layers
        first.mlp.experts.maps.data.mul_(2)
        second.input_layernorm.weight.data = second.input_layernorm.weight.data * 3
        other = torch.nn.Parameter(model.norm.weight.data * 5, requires_grad=False)
        model.norm.weight = other
        found = run(config, forward)
        assert sum(kernel.book.calls.values()) == 4
    torch.testing.assert_close(found, run(config, model.forward))
    assert not torch.allclose(found, old)


@feature("compiled in pieces, and from the compile cache", "right", POINT)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_model_as_vllm_compiles_it_runs_the_one_call(
    backend: str, config: Any, gpt_oss: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its own wrapper, in pieces, and with all of its passes but one, which asks for vLLM's C
    kernels; with Inductor, the second model finds the code of the first in vLLM's cache."""
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(config.compilation_config, "backend", backend)
    monkeypatch.setattr(config.compilation_config, "compile_sizes", [])
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda *_: None)
    expected = run(config, gpt_oss().forward)
    kernel = dispatching()
    before = compilation_counter.num_aot_artifacts_loaded
    # compiling changes it, which a second process does not see
    fresh = copy.copy(config.compilation_config)
    passes = dict(fresh.inductor_compile_config)
    with patched(kernel):
        for _ in range(2):
            torch._dynamo.reset()
            monkeypatch.setattr(config, "compilation_config", copy.copy(fresh))
            config.compilation_config.inductor_compile_config = dict(passes)
            model = gpt_oss()
            assert not model.do_not_compile
            for _ in range(2):
                torch.testing.assert_close(run(config, model), expected)
        assert sum(kernel.book.calls.values()) == 8
        assert not kernel.book.fallbacks
    found = compilation_counter.num_aot_artifacts_loaded - before
    assert found == (1 if backend == "inductor" else 0)


@feature("`enforce_eager`, mode NONE", "falls back", POINT)
def test_a_model_that_is_not_compiled_keeps_its_own_and_says_so(config: Any, gpt_oss: Any) -> None:
    model, kernel = gpt_oss(), dispatching()
    expected = run(config, model.forward)
    with patched(kernel):
        assert torch.equal(run(config, model.forward), expected)
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"not in a graph that vLLM compiles": 2}


def _offloaded(model: Any) -> None:
    """As `offload_group_size`: operators of vLLM bring a layer's weights, here from a copy."""
    from vllm.model_executor.offloader import base, prefetch

    class Elsewhere(prefetch.PrefetchOffloader):  # type: ignore[misc]
        def __init__(self, layers: list[Any]) -> None:
            self.prefetch_step, self.module_offloaders = 1, layers
            self.kept = [[each.data.clone() for each in layer.parameters()] for layer in layers]
            for index, layer in enumerate(layers):
                self._start_prefetch(index)
                self._hook_module_forward(index, layer)

        def _wait_for_layer(self, layer_idx: int) -> None:
            held = self.module_offloaders[layer_idx].parameters()
            for parameter, kept in zip(held, self.kept[layer_idx], strict=True):
                parameter.data.copy_(kept)

        def _start_prefetch(self, layer_idx: int) -> None:
            for parameter in self.module_offloaders[layer_idx].parameters():
                parameter.data.zero_()

    base.set_offloader(Elsewhere(list(model.layers)))


def _steered(model: Any) -> None:
    def hook(layer: Any, args: Any, result: Any) -> Any:
        return result[0] + 1, result[1]

    model.layers[0].register_forward_hook(hook)


def _normed_differently(model: Any) -> None:
    model.norm.register_forward_pre_hook(lambda norm, args: (args[0] * 2, args[1]))


def _scaled_router(model: Any) -> None:
    model.layers[1].mlp.router.register_forward_hook(lambda layer, args, result: result * 2)


def _read(model: Any) -> None:
    """As EAGLE3 reads the hidden states of some layers."""
    model.aux_hidden_state_layers = (1,)


def _other_experts(model: Any) -> None:
    model.layers[0].mlp.experts.method.moe_kernel = Kernel("OAITritonExperts")


def _of_several_ranks(model: Any) -> None:
    model.layers[1].mlp.experts.routed_experts.expert_map = torch.zeros(4)


def _lora(model: Any) -> None:
    """As vLLM wraps the experts of gpt-oss for LoRA."""
    from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA

    for layer in model.layers:
        wrapper = FusedMoE3DWithLoRA.__new__(FusedMoE3DWithLoRA)
        torch.nn.Module.__init__(wrapper)
        inner = layer.mlp.experts
        inner.method.moe_kernel = Kernel("UnfusedOAITritonExperts")
        wrapper.base_layer, wrapper.moe_config = inner, inner.moe_config
        wrapper._shared_experts = inner._shared_experts
        layer.mlp.experts = wrapper


def _parallel(model: Any) -> None:
    for layer in model.layers:
        layer.mlp.experts.moe_config.tp_size = 2


def _scaled(model: Any) -> None:
    model.layers[0].mlp.experts.routed_output_transform = torch.nn.Linear(HIDDEN, HIDDEN)


PART = "what the norm is given is read later as a part of something else"


def test_a_residual_of_which_a_view_is_read_later_is_not_written(config: Any, gpt_oss: Any) -> None:
    model, kernel, seen = gpt_oss(), dispatching(), list[Any]()
    [first, second] = model.layers
    first.post_attention_layernorm.register_forward_hook(
        lambda norm, args, out: seen.append(out[1].unflatten(1, (4, -1)))
    )
    second.input_layernorm.register_forward_hook(
        lambda norm, args, out: (out[0] + seen.pop().flatten(1), out[1])
    )
    expected = run(config, model.forward)
    with patched(kernel):
        torch.testing.assert_close(run(config, compiled(model.forward)), expected)
    assert sum(kernel.book.calls.values()) == 1
    assert dict(kernel.book.fallbacks) == {PART: 1}


CHANGED: dict[str, tuple[Callable[[Any], None], int, tuple[str, ...]]] = {
    # what was switched on; pairs that are still fused; what is said of the others
    "weights offloaded: prefetch, or without UVA": (
        _offloaded,
        0,
        ("vllm::start_prefetch reads the experts' result before a norm",),
    ),
    "a hook on a layer": (_steered, 1, ("add reads the experts' result before a norm",)),
    "a hook on a norm": (
        _normed_differently,
        1,
        ("mul reads the experts' result before a norm",),
    ),
    "a hook on a router": (_scaled_router, 2, ()),
    "EAGLE3: hidden states of layers are read": (
        _read,
        1,
        ("add reads the experts' result before a norm",),
    ),
    "experts of another class": (_other_experts, 1, ("experts by OAITritonExperts",)),
    "expert parallelism": (_of_several_ranks, 1, ("experts shared by several ranks",)),
    "LoRA on experts": (_lora, 0, ("experts by UnfusedOAITritonExperts",)),
    "tensor parallelism": (
        _parallel,
        0,
        ("vllm::all_reduce reads the experts' result before a norm",),
    ),
    "a transform after experts": (_scaled, 1, ("linear reads the experts' result before a norm",)),
}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside add_norm"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(name, marks=feature(name, "right" if fused == 2 else "falls back", POINT))
        for name, (_, fused, _) in CHANGED.items()
    ],
)
def test_what_people_switch_on_stays_right_and_is_told(
    change: str, beside: bool, config: Any, gpt_oss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import parallel_state
    from vllm.model_executor.offloader import base

    monkeypatch.setattr(
        parallel_state.GroupCoordinator,
        "all_reduce",
        lambda group, x: torch.ops.vllm.all_reduce(x, group_name=group.unique_name),
    )
    monkeypatch.setattr(
        parallel_state.GroupCoordinator, "_all_reduce_out_place", lambda group, x: x * 2
    )
    monkeypatch.setattr(base, "_instance", base.get_offloader())
    switch_on, fused, reasons = CHANGED[change]
    torch.manual_seed(3)
    model = gpt_oss()
    switch_on(model)
    expected = run(config, model.forward)
    kernel = dispatching()
    guards = guards_of("fused_add_rms_norm", T=torch.float32, W=torch.float32)
    norms = dispatcher(
        "fused_add_rms_norm", add_norm, replace(guards, scalars=(("epsilon", float),))
    )
    with ExitStack() as stack:
        if beside:
            stack.enter_context(patched(norms, "add_norm"))
        with patched(kernel):
            torch.testing.assert_close(run(config, compiled(model.forward)), expected)
    assert sum(kernel.book.calls.values()) == fused
    assert tuple(kernel.book.fallbacks) == reasons
    assert sum(kernel.book.fallbacks.values()) == 2 - fused


@feature("pipeline parallelism", "falls back", POINT)
@feature("shared experts", "falls back", POINT)
def test_pipeline_stages_and_shared_experts_and_other_widths_are_told(
    config: Any, gpt_oss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.forward_context import set_forward_context

    model, kernel = gpt_oss(), dispatching()
    blocks = model.layers

    def stage(hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        residual = None
        for layer in blocks:
            hidden, residual = layer(hidden, positions, residual)
        return hidden, residual

    given = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS) / 7
    with set_forward_context(None, config):
        expected = stage(*given)
    with patched(kernel), set_forward_context(None, config):
        torch.testing.assert_close(compiled(stage)(*given), expected)
    assert sum(kernel.book.calls.values()) == 1
    end = "the end of the graph reads the experts' result before a norm"
    assert dict(kernel.book.fallbacks) == {end: 1}

    first, second = (layer.mlp.experts for layer in blocks)
    first._shared_experts = SimpleNamespace(output=None)
    first._forward_entry = torch.ops.vllm.moe_forward_shared
    shared = type(first)._forward_impl

    def both(layer: Any, hidden: Any, *rest: Any) -> Any:
        routed = shared(layer, hidden, *rest)
        return (hidden * 3, routed) if layer is first else routed[:, :-2].contiguous()

    monkeypatch.setattr(type(first), "_forward_impl", both)
    second.moe_config.hidden_dim_unpadded = HIDDEN - 2
    second.method.has_unpadded_output = True
    kernel = dispatching()

    def experts(hidden: torch.Tensor, logits: torch.Tensor) -> Any:
        return first(hidden, logits), second(hidden, logits)

    given = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, 4)
    with set_forward_context(None, config):
        expected = experts(*given)
    with patched(kernel), set_forward_context(None, config):
        torch.testing.assert_close(compiled(experts)(*given), expected)
    assert dict(kernel.book.fallbacks) == {"shared experts": 1, "experts of another width": 1}
    assert POINTS[POINT]().applies(first) == "shared experts"


def test_a_norm_that_leaves_its_arguments_to_others_is_not_fused(config: Any, gpt_oss: Any) -> None:
    """As `GemmaRMSNorm` calls vLLM's operator."""
    from vllm import ir
    from vllm.forward_context import set_forward_context

    [experts, _] = (layer.mlp.experts for layer in gpt_oss().layers)
    given = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, 4), torch.rand(HIDDEN)

    def kept(hidden: Any, logits: Any, weight: Any) -> Any:
        residual = hidden + 1
        found = ir.ops.fused_add_rms_norm(experts(hidden, logits), residual, weight, 1e-5)
        return *found, residual

    def half(hidden: Any, logits: Any, weight: Any) -> Any:
        operation = ir.ops.fused_add_rms_norm.maybe_inplace
        return operation(experts(hidden, logits), hidden + 1, weight, 1e-5, HIDDEN // 2)

    def callers(hidden: Any, logits: Any, weight: Any) -> Any:
        operation = ir.ops.fused_add_rms_norm.maybe_inplace
        return operation(experts(hidden.clone(), logits), hidden, weight, 1e-5, None)

    for forward, reason in {
        kept: "a norm that leaves its arguments to others",
        half: "another kind of norm",
        callers: "a residual that belongs to the caller",
    }.items():
        kernel = dispatching()
        with set_forward_context(None, config), patched(kernel):
            expected = forward(*(tensor.clone() for tensor in given))
            kernel.book.reasons.clear()
            torch.testing.assert_close(compiled(forward)(*given), expected)
        assert dict(kernel.book.fallbacks) == {reason: 1}
        assert not kernel.book.calls


TRITON = (POINT, SUM, "router.oai", "experts.gate_up.mxfp4", "experts.down.mxfp4")


@feature("experts of EPLB, data parallelism, all2all, Marlin or FlashInfer", "falls back", *TRITON)
@feature("expert parallelism", "falls back", *TRITON)
@pytest.mark.parametrize("point", TRITON)
def test_layers_with_experts_of_other_classes_are_told(point: str, gpt_oss: Any) -> None:
    """Those of EPLB, data parallelism and all2all, of LoRA, and of another backend."""
    experts = gpt_oss().layers[0].mlp.experts
    installed = POINTS[point]()
    assert installed.of_role(experts)
    assert installed.applies(experts) is None
    experts.routed_experts.expert_map = torch.zeros(4)
    assert installed.applies(experts) == "experts shared by several ranks"
    for name in ("OAITritonExperts", "UnfusedOAITritonExperts"):
        experts.method.moe_kernel = Kernel(name)
        assert installed.applies(experts) == f"experts by {name}"
    experts.method.moe_kernel = None
    assert installed.applies(experts) == "experts by SimpleNamespace"


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT, "add_norm")
def test_it_refuses_an_engine_that_must_be_invariant_to_batches(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for name in (POINT, "add_norm"):
        with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT"):
            POINTS[name]().find()


@feature("several engines of one process", "right", POINT)
def test_engines_in_threads_do_not_take_each_others_rows(
    config: Any, gpt_oss: Any, sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is stopped between its experts' start and their sum, while the other runs whole."""
    from vllm.forward_context import set_forward_context

    [one, other] = (layer.mlp.experts for layer in gpt_oss(True).layers)
    given = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, 4)
    expected = [layer._forward_impl(*given) for layer in (one, other)]
    started, go_on = threading.Event(), threading.Event()
    whole = type(one)._forward_impl

    def slow(layer: Any, *call: Any) -> Any:
        if layer is one:
            started.set()
            assert go_on.wait(60)
        return whole(layer, *call)

    monkeypatch.setattr(type(one), "_forward_impl", slow)
    rows: list[Any] = []
    kernel = dispatching()
    with patched(kernel):
        operator = getattr(torch.ops.patcher, f"experts_{kernel.book.digest[:12]}")

        def unsummed() -> None:
            with torch.no_grad(), set_forward_context(None, config):
                rows.append(operator(given[0].clone(), given[1], TOP_K, one._encode_layer_name()))

        thread = threading.Thread(target=unsummed)
        thread.start()
        assert started.wait(60)
        sums.clear()
        torch.testing.assert_close(other._forward_impl(*given), expected[1])
        assert sums == [TOKENS]
        go_on.set()
        thread.join(60)
        [(found, row_map)] = rows
        torch.testing.assert_close(found[row_map.long()].sum(1), expected[0])
        assert sums == [TOKENS]
