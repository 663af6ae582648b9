"""Norm and quantisation in one call, before layers in fp8 of the real vLLM, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_attention import Compiled
from vllm_fp8 import BLOCK, INNER, Gpu, gpu, layer_of, rows_of
from vllm_here import config, needs_vllm, nothing, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpu")  # fixtures of tests here

pytestmark = needs_vllm

POINT, NORM = "rms_norm_quant_fp8", "vllm_ir::rms_norm"
TYPES = {"T": torch.bfloat16, "Q": torch.float8_e4m3fn, "F": torch.float32}
LABEL = f"{POINT} tokens=3 groups={INNER // BLOCK} group={BLOCK} bfloat16/float8_e4m3fn/float32"


def dispatching() -> Dispatcher:
    made = shipped(POINT, ("epsilon", float), W=torch.bfloat16, **TYPES)
    made.guards = replace(made.guards, axes={"tokens": AxisBounds(maximum=64)})
    return made


class Model(torch.nn.Module):
    """A norm, and what `change` makes of it and a layer."""

    def __init__(self, layer: Any, change: Any = None, kind: str = "RMSNorm") -> None:
        super().__init__()
        from vllm.model_executor.layers import layernorm

        self.norm = getattr(layernorm, kind)(INNER, eps=1e-5)
        self.norm.weight.data.copy_(rows_of(1)[0])
        self.layer = layer
        self.change = change or (lambda model, x: model.layer(model.norm(x)))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.change(self, hidden_states)


@pytest.fixture
def kernel() -> Iterator[Dispatcher]:
    made = dispatching()
    with patched(POINT, made):
        yield made


class CudaAlike:
    """A platform that has vLLM's CUDA kernels, and else is the one that is here."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def by_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's CUDA quantisation, which `+quant_fp8` puts into graphs."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def run(x: Any, quantised: Any, scales: Any, group: int, least: float, *rest: Any) -> None:
        groups = x.float().unflatten(1, (-1, group))
        scales.copy_(groups.abs().amax(-1).clamp_min(least) / 448.0)
        quantised.copy_((groups / scales.unsqueeze(-1)).flatten(1))

    library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, "
        "int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0, "
        "bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
    )
    library.impl("per_token_group_fp8_quant", run, "CPU")
    library.impl("per_token_group_fp8_quant", nothing, "Meta")
    monkeypatch.setattr(fp8_utils, "current_platform", CudaAlike(fp8_utils.current_platform))
    yield
    library._destroy()


def near(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0.04, atol=0.04 * expected.abs().max().item())


def fused(run: Compiled, kernel: Dispatcher) -> None:
    """One operator is in the place of the chain, and no mark is left."""
    assert dict(kernel.book.calls) == {LABEL: 1}
    assert not kernel.book.fallbacks
    assert f"patcher::{POINT}_{kernel.book.digest}" in run.graph
    assert not {"enter", "leave", "left_alone", "amax", "max"} & {*run.graph}
    assert not [name for name in run.graph if name.startswith(("vllm_ir", "_C::per_token"))]


@feature("compiled in pieces, and from the compile cache", "right", POINT)
@feature("other points beside it", "right", POINT)
@pytest.mark.parametrize("beside", [(), ("quantize_fp8",), ("linear_fp8",)])
def test_one_call_norms_and_quantises(gpu: Gpu, beside: tuple[str, ...], kernel: Any) -> None:
    model, x = Model(layer_of("cutlass" if "linear_fp8" in beside else "triton")), rows_of(3)
    expected = model(x)
    kernel.book.reasons.clear()
    others = {name: shipped(name, **TYPES) for name in beside}
    with ExitStack() as stack:
        for name, other in others.items():
            point = stack.enter_context(patched(name, other))
            assert point.applies(model.layer) is None
        run = Compiled(model)
        for other in others.values():
            other.book.reasons.clear()
        kernel.book.reasons.clear()
        before = {name: sum(other.book.calls.values()) for name, other in others.items()}
        near(run(hidden_states=x), expected)
        fused(run, kernel)
        made = {name: sum(o.book.calls.values()) - before[name] for name, o in others.items()}
        assert made == {name: int(name == "linear_fp8") for name in beside}


def test_vllms_operator_is_taken_out_with_the_norm(gpu: Gpu, by_operator: None) -> None:
    model, x = Model(layer_of("triton")), rows_of(3)
    quantiser = model.layer.quant_method.fp8_linear.quant_fp8
    quantiser._forward_method = quantiser.forward_cuda
    stock = Compiled(model)
    expected = stock(hidden_states=x)
    assert {NORM, f"{NORM}.default"} & {*stock.graph}
    assert [name for name in stock.graph if name.startswith("_C::per_token_group_fp8_quant")]
    torch._dynamo.reset()
    made = dispatching()
    with patched(POINT, made):
        run = Compiled(model)
        near(run(hidden_states=x), expected)
        fused(run, made)
    again = Compiled(model)
    assert torch.equal(again(hidden_states=x), expected)
    assert again.graph == stock.graph


@feature("whole graphs, `use_inductor_graph_partition`", "right", POINT)
def test_by_inductor_it_is_right_too(gpu: Gpu, kernel: Dispatcher) -> None:
    from torch._inductor import compile_fx

    def inductor(module: torch.fx.GraphModule, given: Any) -> Any:
        return compile_fx.compile_fx(module, given, config_patches={"fx_graph_cache": False})

    model, x = Model(layer_of("triton")), rows_of(3)
    expected = model(x)
    kernel.book.reasons.clear()
    run = Compiled(model, (), inductor)
    for _ in range(2):
        near(run(hidden_states=x), expected)
    assert dict(kernel.book.calls) == {LABEL: 2}
    assert not kernel.book.fallbacks


def test_what_the_kernel_does_not_take_is_vllms_own(gpu: Gpu, kernel: Dispatcher) -> None:
    model, many = Model(layer_of("triton")), rows_of(65)
    expected = model(many)
    kernel.book.reasons.clear()
    near(Compiled(model)(hidden_states=many), expected)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"tokens above 64": 1}


def low_rank(model: Model, x: torch.Tensor) -> Any:
    return model.layer(model.norm(torch.cat([x, x], 1).split([INNER, INNER], 1)[1]))


def test_parts_of_wider_rows_need_no_copy(gpu: Gpu, kernel: Dispatcher) -> None:
    model, x = Model(layer_of("triton"), low_rank), rows_of(3)
    expected = model(x)
    kernel.book.reasons.clear()
    run = Compiled(model)
    near(run(hidden_states=x), expected)
    fused(run, kernel)
    assert "contiguous" not in run.graph


def test_a_scale_for_each_row_is_one_group(gpu: Gpu, kernel: Dispatcher) -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    def apart(model: Model, x: torch.Tensor) -> torch.Tensor:
        quantised, scales = model.layer(model.norm(x))
        return quantised.float() * scales

    model, x = Model(QuantFP8(False, GroupShape.PER_TOKEN), apart), rows_of(3)
    expected = model(x)
    kernel.book.reasons.clear()
    run = Compiled(model)
    torch.testing.assert_close(run(hidden_states=x), expected, rtol=0.13, atol=0.01)
    [label] = kernel.book.calls
    assert f"groups=1 group={INNER} " in label
    assert not kernel.book.fallbacks


@pytest.mark.parametrize("first", [POINT, "embed_norm"])
def test_of_two_points_the_first_one_has_the_norm(gpu: Gpu, first: str) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    table = VocabParallelEmbedding(50, INNER)
    table.weight.data.copy_(rows_of(len(table.weight)))
    model = Model(layer_of("triton"), lambda model, ids: model.layer(model.norm(table(ids))))
    ids, types = torch.tensor([3, 0, 49], dtype=torch.int32), torch.bfloat16
    expected = model(ids)
    looking = shipped("embed_norm", ("epsilon", float), T=types, W=types, I=torch.int32)
    both = {POINT: dispatching(), "embed_norm": looking}
    taken, [(second, left)] = both.pop(first), both.items()
    with patched(first, taken), patched(second, left):
        taken.book.reasons.clear()
        near(Compiled(model)(hidden_states=ids), expected)
    assert sum(taken.book.calls.values()) == 1
    assert not taken.book.fallbacks
    assert not left.book.calls
    assert dict(left.book.fallbacks) == {f"{first} has the norm": 1}


@pytest.mark.parametrize("backend", ["cutlass", "triton"])
def test_layers_are_surveyed_again_beside_the_matmul(
    gpu: Gpu, backend: str, kernel: Dispatcher
) -> None:
    """As after new weights; a trial of the matmul is no call of the model."""
    model, x = Model(layer_of(backend)), rows_of(3)
    expected = model(x)
    multiply = shipped("linear_fp8", **TYPES)
    quantise = shipped("quantize_fp8", **TYPES)
    with patched("linear_fp8", multiply) as beside, patched("quantize_fp8", quantise) as inside:
        kernel.book.reasons.clear()
        gpu.factor = 1.25
        assert survey(beside, multiply.guards, [model.layer]).taken == 0
        gpu.factor = 1.0
        points = (POINTS[POINT](), kernel), (beside, multiply), (inside, quantise)
        for _ in range(2):
            for point, made in points:
                assert survey(point, made.guards, [model.layer]).taken == 1
        for _, made in points:
            assert not made.book.calls
            assert not made.book.fallbacks
        gpu.rows.clear()
        run = Compiled(model)
        near(run(hidden_states=x), expected)
        fused(run, kernel)
        assert sum(multiply.book.calls.values()) == 1
        assert not gpu.rows
        near(model(x), expected)  # without a compiler
        assert sum(multiply.book.calls.values()) == 2
        assert sum(quantise.book.calls.values()) == 1


@feature("`enforce_eager`, mode NONE", "falls back", POINT)
def test_outside_of_compiled_graphs_it_is_vllms_and_counted(gpu: Gpu, kernel: Dispatcher) -> None:
    Model(layer_of("triton"))(rows_of(3))
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"outside vLLM's compiled graphs": 1}


LEFT: dict[str, Any] = {
    "getitem makes what is quantised, and no plain norm": (
        lambda model, x: model.layer(model.norm(x.clone(), x.clone())[0])
    ),
    "mul makes what is quantised, and no plain norm": (
        lambda model, x: model.layer(2 * model.norm(x))
    ),
    "sum reads what the norm makes, too": (
        lambda model, x: (lambda normed: model.layer(normed) + normed.sum())(model.norm(x))
    ),
    "another quantisation reads what the norm makes, too": (
        lambda model, x: (lambda normed: model.layer(normed) + model.layer(normed))(model.norm(x))
    ),
    "a norm of something else than rows": (
        lambda model, x: model.layer(model.norm(x.view(1, -1, INNER)))
    ),
    "a weight that is computed": None,
    "scales column by column": None,
    "norm.plain has the norm": None,
}


@pytest.mark.parametrize("reason", LEFT)
def test_another_chain_stays_vllms_own_and_is_told(
    reason: str, gpu: Gpu, kernel: Dispatcher
) -> None:
    kind = "GemmaRMSNorm" if reason == "a weight that is computed" else "RMSNorm"
    layer = layer_of("cutlass" if reason == "scales column by column" else "triton")
    model, x = Model(layer, LEFT[reason], kind), rows_of(3)
    expected = model(x)
    with ExitStack() as stack:
        if reason == "norm.plain has the norm":
            types = {"T": torch.bfloat16, "W": torch.bfloat16}
            stack.enter_context(
                patched("norm.plain", shipped("rms_norm", ("epsilon", float), **types))
            )
        run = Compiled(model)
        kernel.book.reasons.clear()
        near(run(hidden_states=x), expected)
    assert not kernel.book.calls
    counted = 2 if reason.startswith("another") else 1
    assert dict(kernel.book.fallbacks) == {reason: counted}
    assert kernel.book.compiled_out[reason] == counted, "a process that loads the graph counts none"
    assert not {"enter", "leave", "left_alone"} & {*run.graph}


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("triton", None),
        ("cutlass", "scales column by column"),
        ("flashinfer", "a kernel that quantises x itself"),
    ],
)
def test_layers_say_whether_a_norm_before_them_could_be_taken(
    gpu: Gpu, backend: str, reason: str | None, kernel: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.integrate.vllm import engine

    layer, point = layer_of(backend), POINTS[POINT]()
    seen = survey(point, kernel.guards, [layer, Model(layer).norm])
    assert (seen.total, dict(seen.refused)) == (1, {reason: 1} if reason else {})
    monkeypatch.setattr(engine, "compiles_graphs", lambda: False)
    assert str(point.applies(layer)).startswith("vLLM compiles no graph")


def test_passes_that_lose_it_are_named(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config.compilation_config.pass_config, "fuse_norm_quant", True)
    with patched(POINT, dispatching()):
        assert "no longer fused by fuse_norm_quant" in caplog.text


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_a_batch_invariant_engine_refuses_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[POINT]().find()
