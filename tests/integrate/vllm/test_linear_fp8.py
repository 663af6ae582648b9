"""Linear layers in fp8 with block scales: the real vLLM's Python, a double for each CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_fp8 import BACKENDS, BLOCK, INNER, OUTER, Gpu, gpu, layer_of, rows_of
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpu")  # fixtures of tests here

pytestmark = needs_vllm

POINT = "linear_fp8"
TYPES = {"Q": torch.float8_e4m3fn, "F": torch.float32, "T": torch.bfloat16}


def kernel() -> Dispatcher:
    made = shipped(POINT, **TYPES)
    axes = bench.load_op(POINT).contract.guards.axes.items()
    served = {axis: AxisBounds(it.minimum, it.maximum, it.multiple_of) for axis, it in axes}
    made.guards = replace(made.guards, axes=served)
    return made


@feature("compiled in pieces, and from the compile cache", "right", POINT)
@feature("`enforce_eager`, mode NONE", "right", POINT)
@pytest.mark.parametrize(
    ("backend", "compiled"), [*((each, False) for each in BACKENDS), ("cutlass", True)]
)
def test_layers_run_the_kernel_and_many_rows_the_engines_own(
    gpu: Gpu, backend: str, compiled: bool
) -> None:
    layer, bare = layer_of(backend, bias=True), layer_of(backend)
    few, many = rows_of(3), rows_of(70)
    expected = [layer(few), bare(few), layer(many), bare(many)]
    method = type(layer.quant_method.fp8_linear).apply_block_scaled_mm
    multiplying = layer.quant_method.fp8_linear
    quantiser = getattr(multiplying, "fallback", multiplying).quant_fp8
    by_columns = quantiser.column_major_scales, quantiser.tma_aligned_scales

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), bare(x)

    run = torch.compile(both, fullgraph=True, dynamic=True) if compiled else both
    dispatch = kernel()
    with patched(POINT, dispatch) as point:
        for _ in range(2):  # as after new weights
            assert survey(point, dispatch.guards, [layer, bare]).taken == 2
            assert not quantiser.column_major_scales
        gpu.rows.clear()
        for given, own in zip(run(few), expected, strict=False):
            torch.testing.assert_close(given, own, rtol=0.05, atol=0.05 * own.abs().max().item())
        assert not gpu.rows
        for given, own in zip(run(many), expected[2:], strict=True):
            assert torch.equal(given, own)
        assert gpu.rows == [70, 70]
        label = f"linear_fp8 tokens=3 blocks={INNER // BLOCK} outer={OUTER} block={BLOCK}"
        assert dict(dispatch.book.calls) == {f"{label} float8_e4m3fn/float32/bfloat16": 2}
        assert dict(dispatch.book.fallbacks) == {"tokens above 64": 2}
    assert type(multiplying).apply_block_scaled_mm is method
    assert (quantiser.column_major_scales, quantiser.tma_aligned_scales) == by_columns
    assert torch.equal(layer(few), expected[0])
    assert torch.equal(layer(many), expected[2])


@pytest.mark.parametrize("backend", ["cutlass", "deep_gemm"])
def test_scales_by_columns_are_right_without_a_survey(gpu: Gpu, backend: str) -> None:
    layer, x = layer_of(backend), rows_of(5)
    expected = layer(x)
    dispatch = kernel()
    with patched(POINT, dispatch):
        torch.testing.assert_close(layer(x), expected, rtol=0.02, atol=0.02)
        assert sum(dispatch.book.calls.values()) == 1


@feature("`model_impl='transformers'`", "right", POINT)
def test_a_further_axis_is_flattened_for_the_kernel(gpu: Gpu) -> None:
    layer, x = layer_of("cutlass"), rows_of(3).unsqueeze(0)
    expected, dispatch = layer(x), kernel()
    with patched(POINT, dispatch):
        given = layer(x)
        assert given.shape == (1, 3, OUTER)
        torch.testing.assert_close(given, expected, rtol=0.02, atol=0.02)
        assert sum(dispatch.book.calls.values()) == 1


def packed(layer: Any) -> None:
    """As DeepGEMM's kernel has scales on Blackwell."""
    layer.weight_scale_inv = torch.nn.Parameter(
        torch.zeros(OUTER, 1, dtype=torch.int32), requires_grad=False
    )


def batched(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data.unsqueeze(0), requires_grad=False)


def powers(layer: Any) -> None:
    scale = layer.weight_scale_inv.data.to(torch.float8_e8m0fnu)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)


def odd(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data[:72], requires_grad=False)


def other_kernel(layer: Any) -> None:
    class Marlin:
        pass

    layer.quant_method.fp8_linear = Marlin()


def packed_x(layer: Any) -> None:
    quantise = layer.quant_method.fp8_linear.quant_fp8.forward_native
    layer.quant_method.fp8_linear.quant_fp8 = lambda x, *more, **named: (
        quantise(x)[0],
        torch.zeros(len(x), 1, dtype=torch.int32),
    )


LAYOUTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "scales packed for DeepGEMM": (
        packed,
        "a weight in another layout: float8_e4m3fn [80, 96], scales int32 [80, 1]",
    ),
    "weights of a batched matmul": (
        batched,
        "a weight in another layout: float8_e4m3fn [1, 80, 96], scales float32 [3, 3]",
    ),
    "scales in e8m0": (
        powers,
        "a weight in another layout: float8_e4m3fn [80, 96], scales float8_e8m0fnu [3, 3]",
    ),
    "rows no multiple of 16": (
        odd,
        "a weight in another layout: float8_e4m3fn [72, 96], scales float32 [3, 3]",
    ),
    "Marlin": (other_kernel, "weights by Marlin"),
    "packed scales of x": (packed_x, "scales of x int32 [2, 1]"),
}


@feature("weights or scales in another layout", "falls back", POINT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_in_another_layout_has_a_reason(gpu: Gpu, layout: str) -> None:
    layer, dispatch = layer_of("cutlass"), kernel()
    change, reason = LAYOUTS[layout]
    change(layer)
    with patched(POINT, dispatch) as point:
        assert dict(survey(point, dispatch.guards, [layer]).refused) == {reason: 1}


def test_scales_in_another_layout_reach_the_engines_own_code(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass

    layer, dispatch, x = layer_of("cutlass"), kernel(), rows_of(3)
    packed(layer)
    seen: list[Any] = []

    def scaled_mm(a: Any, b: Any, **more: Any) -> torch.Tensor:
        seen.append(more["scale_b"].dtype)
        return torch.ones(len(a), OUTER)

    monkeypatch.setattr(cutlass.ops, "cutlass_scaled_mm", scaled_mm)
    with patched(POINT, dispatch):
        assert layer(x).eq(1).all()
    assert seen == [torch.int32]
    assert not dispatch.book.calls
    assert not dispatch.book.fallbacks


def test_layers_without_blocks_or_with_oblong_ones_have_a_reason(gpu: Gpu) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    oblong, dispatch = layer_of("cutlass", block=(16, 32)), kernel()
    plain = ReplicatedLinear(INNER, OUTER, bias=False, return_bias=False)
    with patched(POINT, dispatch) as point:
        seen = survey(point, dispatch.guards, [oblong, plain])
        assert dict(seen.refused) == {"blocks that are no squares, or not those of x": 1}
        assert seen.total == 1, "a plain layer is no layer of the role"


@feature("a layer that computes something else", "falls back", POINT)
@pytest.mark.parametrize("backend", ["cutlass", "flashinfer"])
def test_a_layer_that_fails_its_trial_stays_with_the_engine(gpu: Gpu, backend: str) -> None:
    layer, dispatch, x = layer_of(backend), kernel(), rows_of(3)
    gpu.factor = 1.25
    expected = layer(x)
    with patched(POINT, dispatch) as point:
        for _ in range(2):
            seen = survey(point, dispatch.guards, [layer])
            assert dict(seen.refused) == {"it computes something else": 1}
        assert torch.equal(layer(x), expected)
        assert not dispatch.book.calls
        assert not dispatch.book.fallbacks
    assert "apply_block_scaled_mm" not in vars(layer.quant_method.fp8_linear)
    gpu.factor = 1.0
    with patched(POINT, kernel()) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1


def test_another_scale_of_the_last_block_fails_the_trial(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, own = layer_of("triton"), gpu.multiply

    def shifted(x: Any, x_scale: Any, weight: Any, weight_scale: Any) -> torch.Tensor:
        moved = torch.cat([weight_scale[:-1], weight_scale[-1:].roll(1, 1)])
        return own(x, x_scale, weight, moved)

    monkeypatch.setattr(gpu, "multiply", shifted)
    with patched(POINT, kernel()) as point:
        assert point.applies(layer) == "it computes something else"


@feature("weights offloaded: prefetch, or without UVA", "falls back", POINT)
def test_an_offloaded_weight_is_not_tried(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from patcher.integrate.vllm import sources

    layer, dispatch, x, real = layer_of("triton"), kernel(), rows_of(3), sources.module
    expected = layer(x)
    platform = SimpleNamespace(current_platform=SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(
        sources, "module", lambda name: platform if name == "vllm.platforms" else real(name)
    )
    with patched(POINT, dispatch) as point:
        assert point.applies(layer) == "an offloaded weight"
        assert torch.equal(layer(x), expected)
        assert not dispatch.book.calls


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_the_batch_invariant_matmul_is_left_alone(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.integrate.vllm import sources

    real = sources.module

    def module(name: str) -> Any:
        return SimpleNamespace(VLLM_BATCH_INVARIANT=True) if name == "vllm.envs" else real(name)

    monkeypatch.setattr(sources, "module", module)
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[POINT]().find()
