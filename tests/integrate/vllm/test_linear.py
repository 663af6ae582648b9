"""vLLM's matmuls with plain weights in the real vLLM: linear layers and the vocabulary's matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_here import config, dispatcher, guards_of, needs_vllm, patched

from patcher import bench
from patcher.ab.verdict import refuse_one_point_twice
from patcher.bench import Candidate, Evaluation, Language, Outcome, Timing
from patcher.integrate import Patch, Store
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm


def matmul(x: torch.Tensor, weight: Any, bias: Any, output: torch.Tensor) -> None:
    output.copy_(x @ weight.t() + bias if bias.numel() else x @ weight.t())


def kernel() -> Dispatcher:
    served = {
        axis: AxisBounds(each.minimum, each.maximum, each.multiple_of)
        for axis, each in bench.load_op("linear").contract.guards.axes.items()
    }
    guards = replace(guards_of("linear", T=torch.float32), axes=served)
    return dispatcher("linear", matmul, guards)


def linear_layer(bias: bool) -> Any:
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = ReplicatedLinear(64, 40, bias=bias, params_dtype=torch.float32, return_bias=False)
    for parameter in layer.parameters():
        parameter.data.uniform_(-1, 1)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer


def label(biased: int) -> str:
    return f"linear tokens=3 outer=40 inner=64 biased={biased} float32"


@feature("layers without bias", "right", "linear")
@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, marks=feature("`enforce_eager`, mode NONE", "right", "linear")),
        pytest.param(
            True, marks=feature("compiled in pieces, and from the compile cache", "right", "linear")
        ),
    ],
)
def test_layers_run_the_kernel_with_and_without_bias_and_many_rows_the_engines_own(
    compiled: bool, config: Any
) -> None:
    layer, bare = linear_layer(bias=True), linear_layer(bias=False)
    few, many = torch.randn(3, 64), torch.randn(70, 64)
    expected = [layer(few), bare(few), layer(many), bare(many)]
    dispatch = kernel()
    point = POINTS["linear"]()
    point.install(dispatch)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), bare(x)

    run = torch.compile(both, fullgraph=True, dynamic=True) if compiled else both
    try:
        for given, own in zip([*run(few), *run(many)], expected, strict=True):
            torch.testing.assert_close(given, own)
        assert dict(dispatch.book.calls) == {label(1): 1, label(0): 1}
        assert dict(dispatch.book.fallbacks) == {"tokens above 64": 2}
    finally:
        point.remove()
        dispatch.close()
        torch._dynamo.reset()
    assert torch.equal(layer(few), expected[0])


def test_compiled_code_gives_weights_as_plain_tensors(config: Any) -> None:
    layer, x, seen = linear_layer(bias=False), torch.randn(3, 64), set[type]()

    def run(x: torch.Tensor, weight: Any, bias: Any, output: torch.Tensor) -> None:
        seen.add(type(weight))
        assert weight.data_ptr() == layer.weight.data_ptr()
        assert weight.is_contiguous()
        matmul(x, weight, bias, output)

    dispatch = dispatcher("linear", run, guards_of("linear", T=torch.float32))
    with patched("linear", dispatch):
        compiled: Any = torch.compile(layer, fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(x), x @ layer.weight.t())
    assert type(layer.weight) is not torch.nn.Parameter
    assert seen == {torch.Tensor}


@feature("`model_impl='transformers'`", "right", "linear")
def test_a_further_axis_is_flattened_for_the_kernel(config: Any) -> None:
    layer, x = linear_layer(bias=False), torch.randn(1, 3, 64)
    expected = layer(x)
    dispatch = kernel()
    point = POINTS["linear"]()
    point.install(dispatch)
    try:
        given = layer(x)
        assert given.shape == (1, 3, 40)
        torch.testing.assert_close(given, expected)
        assert dict(dispatch.book.calls) == {label(0): 1}
    finally:
        point.remove()
        dispatch.close()


@feature("tensor parallelism", "right", "linear")
def test_a_bias_that_only_the_first_rank_adds_is_no_bias_on_the_others(config: Any) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = RowParallelLinear(64, 40, bias=True, params_dtype=torch.float32, return_bias=False)
    for parameter in layer.parameters():
        parameter.data.uniform_(-1, 1)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    dispatch, x = kernel(), torch.randn(3, 64)
    point = POINTS["linear"]()
    point.install(dispatch)
    try:
        torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)
        layer.tp_rank = 1
        torch.testing.assert_close(layer(x), x @ layer.weight.t())
        assert dict(dispatch.book.calls) == {label(1): 1, label(0): 1}
    finally:
        point.remove()
        dispatch.close()


@feature("`enforce_eager`, mode NONE", "right", "lm_head")
def test_the_vocabularys_matrix_runs_the_kernel(config: Any) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead(128, 64, params_dtype=torch.float32)
    head.weight.data.uniform_(-1, 1)
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    x = torch.randn(3, 64)
    expected = head.quant_method.apply(head, x)
    logits = LogitsProcessor(128)
    point, dispatch = POINTS["lm_head"](), kernel()
    point.install(dispatch)
    try:
        torch.testing.assert_close(logits._get_logits(x, head, None), expected)
        assert sum(dispatch.book.calls.values()) == 1
        assert survey(point, dispatch.guards, head.modules()).taken == 1
        assert not survey(POINTS["linear"](), dispatch.guards, head.modules()).total
    finally:
        point.remove()
        dispatch.close()


@feature("quantised layers, another `linear_backend`", "falls back", "linear")
def test_each_layer_that_keeps_the_engines_matmul_has_a_reason(config: Any) -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import LinearMethodBase, ReplicatedLinear

    class EightBits(LinearMethodBase):  # type: ignore[misc]  # stands for any quantised method
        def create_weights(self, *args: Any, **more: Any) -> None: ...
        def apply(self, *args: Any, **more: Any) -> Any: ...

    def layer(inner: int = 64, dtype: torch.dtype = torch.float32) -> Any:
        return ReplicatedLinear(inner, 40, bias=False, params_dtype=dtype)

    quantised, packed, odd, wide, own = (
        *(layer(), layer(), layer(inner=60)),
        *(layer(dtype=torch.float64), layer()),
    )
    quantised.quant_method = EightBits()
    packed.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    own.quant_method._gemm_impl = len
    gate, plain_gate = (GateLinear(64, 8, params_dtype=torch.float32) for _ in range(2))
    gate.allow_cublas_router_gemm = True
    plain_gate.allow_specialized_router_gemm = True
    layers = [layer(), plain_gate, quantised, packed, odd, wide, own, gate]
    seen = survey(POINTS["linear"](), kernel().guards, layers)
    assert seen.taken == 2
    assert dict(seen.refused) == {
        "weights by EightBits": 1,
        "a weight that is no matrix": 1,
        "inner no multiple of 8": 1,
        "weight in float64": 1,
        "another matmul of linear_backend": 1,
        "a router with a kernel of its own": 1,
    }
    assert str(seen).startswith("2 of 8 layers; 1: ")


@feature("`VLLM_BATCH_INVARIANT`", "refused", "linear", "lm_head")
def test_the_batch_invariant_matmul_is_left_alone(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.integrate.vllm import sources

    real = sources.module

    def module(name: str) -> Any:
        return SimpleNamespace(VLLM_BATCH_INVARIANT=True) if name == "vllm.envs" else real(name)

    monkeypatch.setattr(sources, "module", module)
    for name in ("linear", "lm_head"):
        with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
            POINTS[name]().find()


def test_one_source_may_be_a_patch_of_either_point(tmp_path: Path) -> None:
    op = bench.load_op("linear")
    candidate = Candidate(op=op.name, language=Language.TORCH, source="import torch\n")
    figures: dict[str, Any] = {"candidate_us": 1, "baseline_us": 2, "speedup": 2}
    figures |= {"speedup_low": 1.9, "speedup_high": 2.1, "pairs": 4, "calls": 8}
    judged = Evaluation(
        op=op.name,
        language="torch",
        digest=candidate.digest,
        outcome=Outcome.CORRECT,
        timings=(Timing(axes={"tokens": 1}, **figures),),
        geomean_speedup=2.0,
    )

    def made(name: str, **more: Any) -> Patch:
        return Patch.create(
            tmp_path / name, op, candidate, judged, engine="vllm", made_by="test", **more
        )

    layers, head = made("first"), made("head", point_name="lm_head")
    assert [each.manifest.target.point for each in (layers, head)] == ["linear", "lm_head"]
    assert made("former", point_name="linear.unquantized").manifest.id == layers.manifest.id
    store = Store(tmp_path / "home")
    store.apply(layers.folder)
    store.apply(head.folder)
    assert len({each.id for each in store.applied()}) == 2
    refuse_one_point_twice([layers, head])
    with pytest.raises(bench.UsageError, match="no patch point add_norm in vllm"):
        made("none", point_name="add_norm")


def test_a_bundle_that_always_had_a_bias_takes_no_layer_without_one(config: Any) -> None:
    """As bundles have it that were made before the contract had `biased`."""
    guards = kernel().guards
    tensors = tuple(
        replace(each, axes=("outer",)) if each.name == "bias" else each for each in guards.tensors
    )
    layers = [linear_layer(bias=True), linear_layer(bias=False)]
    seen = survey(POINTS["linear"](), replace(guards, tensors=tensors), layers)
    assert (seen.taken, dict(seen.refused)) == (1, {"shapes that do not fit: outer": 1})
