"""Quantisation of the input of layers in fp8, in the real vLLM's Python, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from vllm_fp8 import BLOCK, INNER, Gpu, gpu, layer_of, rows_of
from vllm_here import config, needs_vllm, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

__all__ = ("config", "gpu")  # fixtures of tests here

pytestmark = needs_vllm

POINT = "quantize_fp8"
TYPES = {"T": torch.bfloat16, "Q": torch.float8_e4m3fn, "F": torch.float32}
LABEL = f"{POINT} tokens=3 groups={INNER // BLOCK} group={BLOCK} bfloat16/float8_e4m3fn/float32"


def kernel(most: int | None = 64) -> Dispatcher:
    made = shipped(POINT, **TYPES)
    made.guards = replace(made.guards, axes={"tokens": AxisBounds(maximum=most)})
    return made


def quantiser_of(layer: Any) -> Any:
    return layer.quant_method.fp8_linear.quant_fp8


def near(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@feature("compiled in pieces, and from the compile cache", "right", POINT)
@feature("`enforce_eager`, mode NONE", "right", POINT)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_run_the_kernel_and_what_the_guards_refuse_is_vllms_own(
    gpu: Gpu, compiled: bool
) -> None:
    layer, few, many, dispatch = layer_of("triton"), rows_of(3), rows_of(70), kernel()
    expected, method = [layer(few), layer(many)], type(quantiser_of(layer)).forward
    run = torch.compile(layer, fullgraph=True, dynamic=True) if compiled else layer
    with patched(POINT, dispatch) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1
        near(run(few), expected[0])
        near(run(many), expected[1])
        assert dict(dispatch.book.calls) == {LABEL: 1}
        assert dict(dispatch.book.fallbacks) == {"tokens above 64": 1}
    assert type(quantiser_of(layer)).forward is method
    assert torch.equal(layer(few), expected[0])


@feature("other points beside it", "right", POINT)
@pytest.mark.parametrize("first", [POINT, "linear_fp8"])
def test_beside_the_matmuls_point_scales_by_columns_are_written_by_rows(
    gpu: Gpu, first: str
) -> None:
    layer, x = layer_of("cutlass"), rows_of(3)
    expected = layer(x)
    kernels = {POINT: kernel(), "linear_fp8": shipped("linear_fp8", **TYPES)}
    with ExitStack() as stack:
        points = {
            name: stack.enter_context(patched(name, kernels[name]))
            for name in sorted(kernels, key=lambda name: name != first)
        }
        for name, point in points.items():
            assert survey(point, kernels[name].guards, [layer]).taken == 1
        near(layer(x), expected)
        assert dict(kernels[POINT].book.calls) == {LABEL: 1}
        assert sum(kernels["linear_fp8"].book.calls.values()) == 1
    assert quantiser_of(layer).column_major_scales
    assert torch.equal(layer(x), expected)


def powers(layer: Any) -> None:
    quantiser_of(layer).use_ue8m0 = True


def padded(layer: Any) -> None:
    quantiser_of(layer).num_token_padding = 17


def by_tokens(layer: Any) -> None:
    _put(layer, False, "PER_TOKEN")


def by_tensors(layer: Any) -> None:
    _put(layer, False, "PER_TENSOR")


def static(layer: Any) -> None:
    _put(layer, True, "PER_TENSOR")


def own_class(layer: Any) -> None:
    held = quantiser_of(layer)
    held.__class__ = type("Concat", (type(held),), {})


def own_apply(layer: Any) -> None:
    held = layer.quant_method.fp8_linear
    held.__class__ = type("Marlin", (type(held),), {"apply_weights": lambda *given: None})


def _put(layer: Any, static: bool, shape: str) -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    layer.quant_method.fp8_linear.quant_fp8 = QuantFP8(static, getattr(GroupShape, shape))


LEFT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "scales column by column": ("cutlass", lambda layer: None),
    "scales that are powers of two": ("triton", powers),
    "rows that are padded": ("triton", padded),
    "one scale for a whole token": ("triton", by_tokens),
    "one scale for all tokens": ("triton", by_tensors),
    "a scale that is given": ("triton", static),
    "a quantisation of class Concat": ("triton", own_class),
    "a kernel that quantises x itself": ("flashinfer", lambda layer: None),
    "a kernel that quantises x itself, or not at all": ("triton", own_apply),
}


@feature("weights or scales in another layout", "falls back", POINT)
@pytest.mark.parametrize("reason", LEFT)
def test_another_quantisation_stays_vllms_own_and_says_so(gpu: Gpu, reason: str) -> None:
    backend, change = LEFT[reason]
    layer, dispatch = layer_of(backend), kernel()
    change(layer)
    quantiser, x = quantiser_of(layer), rows_of(3)
    given = (torch.ones(1, 1),) if quantiser.static else ()
    expected = quantiser(x, *given)
    with patched(POINT, dispatch) as point:
        assert dict(survey(point, dispatch.guards, [layer]).refused) == {reason: 1}
        if backend != "flashinfer" and change is not own_apply:  # these never ask it
            for found, own in zip(quantiser(x, *given), expected, strict=True):
                assert torch.equal(found.float(), own.float())
                assert found.stride() == own.stride()
            assert not dispatch.book.calls


def test_what_no_operator_is_given_is_counted(gpu: Gpu) -> None:
    quantiser, dispatch, x = quantiser_of(layer_of("triton")), kernel(), rows_of(6)
    odd, deep = x[:, : INNER - 8], x.view(3, 2, INNER)
    expected = [quantiser(odd), quantiser(deep)]
    with patched(POINT, dispatch):
        for given, own in zip((odd, deep), expected, strict=True):
            quantised, scales = quantiser(given)
            assert quantised.shape == own[0].shape
            near(scales, own[1])
        quantiser(x, scale_ub=torch.ones(1))
    assert sum(dispatch.book.calls.values()) == 1
    assert dict(dispatch.book.fallbacks) == {
        "rows that blocks do not fill, or without one pitch": 1,
        "a scale that is given or bounded": 1,
    }


@pytest.mark.parametrize("beside", [(), ("rms_norm_quant_fp8",)])
def test_a_subclass_with_other_arguments_is_untouched(gpu: Gpu, beside: tuple[str, ...]) -> None:
    from vllm.model_executor.layers.attention.mla_attention import _DecodeConcatQuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    concat = _DecodeConcatQuantFP8(True, GroupShape.PER_TENSOR)
    given = rows_of(3).view(3, 2, -1), rows_of(3).view(3, 2, -1), torch.ones(1)
    expected, kernels = concat(*given), {name: kernel() for name in (POINT, *beside)}
    with ExitStack() as stack:
        for name, made in kernels.items():
            stack.enter_context(patched(name, made))
        assert torch.equal(concat(*given).float(), expected.float())
    assert not any(made.book.fallbacks for made in kernels.values())


def test_rows_apart_are_vllms_own_inside_the_operator(gpu: Gpu) -> None:
    quantiser, dispatch = quantiser_of(layer_of("triton")), kernel()
    x = torch.cat([rows_of(3), rows_of(3)], 1)[:, :INNER]
    expected, scales = quantiser(x)
    with patched(POINT, dispatch):
        found = quantiser(x)
    assert torch.equal(found[0].float(), expected.float())
    assert torch.equal(found[1], scales)
    assert dict(dispatch.book.fallbacks) == {"not contiguous": 1}


@feature("a layer that computes something else", "falls back", POINT)
def test_a_quantiser_that_fails_its_trial_gets_vllms_forward_back(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, dispatch, x = layer_of("triton"), kernel(), rows_of(3)
    kind = type(quantiser_of(layer))
    own = kind._quantize_group_native

    def doubled(this: Any, x: torch.Tensor) -> Any:
        quantised, scales = own(this, x)
        return (quantised.float() / 2).to(quantised.dtype), 2 * scales

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_quantize_group_native", doubled)
        expected = layer(x)
        with patched(POINT, dispatch) as point:
            for _ in range(2):
                seen = survey(point, dispatch.guards, [layer])
                assert dict(seen.refused) == {"it computes something else": 1}
            assert torch.equal(layer(x), expected)
            assert not dispatch.book.calls
    assert "forward" not in vars(quantiser_of(layer))
    with patched(POINT, kernel()) as point:
        assert survey(point, dispatch.guards, [layer]).taken == 1


@feature("weights offloaded: prefetch, or without UVA", "falls back", POINT)
def test_a_layer_whose_weight_is_elsewhere_is_not_tried(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.integrate.vllm import sources

    layer, real = layer_of("triton"), sources.module
    platform = SimpleNamespace(
        current_platform=SimpleNamespace(is_cuda=lambda: True, fp8_dtype=lambda: TYPES["Q"])
    )
    monkeypatch.setattr(
        sources, "module", lambda name: platform if name == "vllm.platforms" else real(name)
    )
    with patched(POINT, kernel()) as point:
        assert point.applies(layer) == "an offloaded weight"


def test_what_passes_draw_to_look_for_is_vllms_own(gpu: Gpu) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    quantiser, dispatch = quantiser_of(layer_of("triton")), kernel()
    with patched(POINT, dispatch), FakeTensorMode() as fake:
        drawn = make_fx(lambda x: quantiser(x))(fake.from_tensor(rows_of(3)))
    names = [str(node.target) for node in drawn.graph.nodes]
    assert any("amax" in name or "max" in name for name in names)
    assert not [name for name in names if name.startswith("patcher")]
    assert not dispatch.book.calls
    assert not dispatch.book.fallbacks


def test_passes_that_lose_it_are_named(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config.compilation_config.pass_config, "fuse_norm_quant", True)
    with patched(POINT, kernel()):
        assert "no longer fused by fuse_norm_quant" in caplog.text


@feature("`VLLM_BATCH_INVARIANT`", "refused", POINT)
def test_a_batch_invariant_engine_refuses_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[POINT]().find()


def test_another_fp8_refuses_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(
        type(current_platform), "fp8_dtype", classmethod(lambda _: torch.float8_e4m3fnuz)
    )
    with pytest.raises(bench.VerificationError, match=r"this device has .*fnuz"):
        POINTS[POINT]().find()
