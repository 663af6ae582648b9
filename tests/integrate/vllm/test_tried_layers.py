"""Norms without a residual and activations of gated MLPs in the real vLLM, tried on numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import OP, add_norm_guards
from patch_sample import kernel as add_norm
from vllm_attention import attention, empty_cache
from vllm_here import config, dispatcher, needs_vllm, patched, shipped

from patcher import bench
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

__all__ = ("attention", "config")  # fixtures of tests here

pytestmark = needs_vllm

NORMS = ("norm.plain", "norm.gemma")
ACTIVATIONS = ("activation.silu", "activation.gelu", "activation.gelu_tanh")
TRIED = NORMS + ACTIVATIONS
TOKENS, SIZE = 3, 64


def kernel_of(name: str) -> Dispatcher:
    if name in NORMS:
        scalars, more = [("epsilon", float)], {"W": torch.float32}
    else:
        scalars, more = [], {}
    return shipped(POINTS[name].op, *scalars, T=torch.float32, **more)


def layer_of(name: str) -> Any:
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    made = {
        "norm.plain": lambda: RMSNorm(SIZE, eps=1e-5, dtype=torch.float32),
        "norm.gemma": lambda: GemmaRMSNorm(SIZE, eps=1e-5),
        "activation.silu": SiluAndMul,
        "activation.gelu": lambda: GeluAndMul(approximate="none"),
        "activation.gelu_tanh": lambda: GeluAndMul(approximate="tanh"),
    }
    layer = made[name]()
    for parameter in layer.parameters():
        parameter.data.uniform_(0.5, 2.0)
    return layer


@feature("`enforce_eager`, mode NONE", "right", *TRIED)
@pytest.mark.parametrize("name", TRIED)
def test_a_layer_runs_the_kernel_and_falls_back_to_the_engines_own(name: str, config: Any) -> None:
    layer, x = layer_of(name), torch.randn(TOKENS, SIZE)
    wide = x.double()
    own, own_wide = layer(x), layer(wide)
    kernel = kernel_of(name)
    with patched(name, kernel) as point:
        given = layer(x)
        assert given.shape == own.shape
        torch.testing.assert_close(given, own)
        assert sum(kernel.book.calls.values()) == 1
        # bit for bit, in whatever dtype
        assert torch.equal(layer(wide), own_wide)
        [(reason, count)] = kernel.book.fallbacks.items()
        assert (reason.startswith("dtype float64"), count) == (True, 1)
        seen = survey(point, kernel.guards, layer.modules())
        assert (seen.taken, seen.total) == (1, 1)
    assert "forward" not in vars(type(layer))
    assert torch.equal(layer(x), own)


@feature("compiled in pieces, and from the compile cache", "right", *TRIED)
@pytest.mark.parametrize("name", TRIED)
def test_inductor_leaves_the_layer_whole(name: str, config: Any) -> None:
    layer, mix = layer_of(name), torch.nn.Linear(SIZE, SIZE)

    def block(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer(mix(x)) * 2
        return found

    xs = [torch.randn(rows, SIZE) for rows in (5, 9)]
    expected = [block(x) for x in xs]
    kernel = kernel_of(name)
    with patched(name, kernel):
        run = torch.compile(block, fullgraph=True, dynamic=True)
        for x, own in zip(xs, expected, strict=True):
            torch.testing.assert_close(run(x), own)
        assert sum(kernel.book.calls.values()) == 2
        assert not kernel.book.fallbacks


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_heads_that_lie_beside_others_stay_with_the_engine(
    name: str, compiled: bool, config: Any
) -> None:
    norm = layer_of(name)
    query = torch.randn(TOKENS, 6 * SIZE)[:, : 2 * SIZE].view(TOKENS, 2, SIZE)
    own, rows = norm(query), norm(query.contiguous())
    kernel = kernel_of(name)
    with patched(name, kernel):
        run: Any = torch.compile(norm, fullgraph=True, backend="eager") if compiled else norm
        assert torch.equal(run(query), own)
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"rows without one pitch": 1}
        torch.testing.assert_close(run(query.contiguous()), rows)
        [label] = kernel.book.calls
        assert f"tokens={2 * TOKENS} hidden={SIZE}" in label


@feature("a layer that computes something else", "falls back", *TRIED)
@pytest.mark.parametrize("name", TRIED)
def test_a_layer_that_fails_its_trial_is_given_back(name: str, config: Any) -> None:
    other, fitting, x = layer_of(name), layer_of(name), torch.randn(TOKENS, SIZE)
    formula = other.forward_native
    other.forward_native = other._forward_method = lambda x, *rest: 1.5 * formula(x, *rest)
    own = other(x)
    kernel = kernel_of(name)
    with patched(name, kernel) as point:
        for _ in range(2):
            seen = survey(point, kernel.guards, [other, fitting])
            assert (seen.taken, dict(seen.refused)) == (1, {"it computes something else": 1})
        assert torch.equal(other(x), own)
        assert not kernel.book.calls
        fitting(x)
        assert sum(kernel.book.calls.values()) == 1
    assert "forward" not in vars(other)
    assert torch.equal(other(x), own)


def test_layers_that_the_ops_do_not_describe_have_a_reason(config: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    norms = [
        *(layer_of("norm.gemma"), RMSNorm(SIZE, has_weight=False)),
        RMSNorm(SIZE, var_hidden_size=SIZE // 2),
    ]
    seen = survey(POINTS["norm.plain"](), kernel_of("norm.plain").guards, norms)
    assert list(seen.refused) == [
        *("a weight that is offset by one", "no weight"),
        "a mean over a part of the row",
    ]
    kernel = kernel_of("activation.gelu")
    layers = [layer_of("activation.gelu_tanh"), layer_of("activation.gelu")]
    seen = survey(POINTS["activation.gelu"](), kernel.guards, layers)
    assert (seen.taken, dict(seen.refused)) == (1, {"another formula: tanh": 1})
    # both formulas are one class: each patch takes its own
    x, tanh = torch.randn(TOKENS, SIZE), kernel_of("activation.gelu_tanh")
    own = [layer(x) for layer in layers]
    with patched("activation.gelu", kernel), patched("activation.gelu_tanh", tanh):
        for layer, expected in zip(layers, own, strict=True):
            torch.testing.assert_close(layer(x), expected)
        assert [sum(each.book.calls.values()) for each in (kernel, tanh)] == [1, 1]


PASSES = {
    **dict.fromkeys(NORMS, ("fuse_norm_quant", "enable_qk_norm_rope_fusion")),
    "activation.silu": ("fuse_act_quant",),
}


@feature("`fuse_norm_quant`, `fuse_act_quant` with quantised weights", "refused", *PASSES)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_would_fuse_the_layer_refuses_the_patch(
    name: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CompilationMode

    from patcher.integrate.vllm.engine import decided_by

    passes, before = config.compilation_config.pass_config, decided_by()
    monkeypatch.setattr(config.compilation_config, "mode", CompilationMode.VLLM_COMPILE)
    monkeypatch.setattr(passes, PASSES[name][0], True)
    POINTS[name]().find()  # nothing is quantised
    monkeypatch.setattr(config, "quant_config", object())
    assert decided_by() != before
    with pytest.raises(bench.VerificationError, match=rf"fuses .*\({PASSES[name][0]}\)"):
        POINTS[name]().find()
    monkeypatch.setattr(config.compilation_config, "mode", CompilationMode.NONE)
    POINTS[name]().find()  # no pass runs
    monkeypatch.setattr(config.compilation_config, "mode", CompilationMode.VLLM_COMPILE)
    monkeypatch.setattr(config, "quant_config", None)
    for other in PASSES[name][1:]:
        monkeypatch.setattr(passes, other, True)
        with pytest.raises(bench.VerificationError, match=other):
            POINTS[name]().find()


@feature("`VLLM_BATCH_INVARIANT`", "refused", *NORMS)
@pytest.mark.parametrize("name", NORMS)
def test_the_batch_invariant_norm_is_left_alone(
    name: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(bench.VerificationError, match="VLLM_BATCH_INVARIANT requires"):
        POINTS[name]().find()


DECODERS = {
    "qwen3": ({"norm.plain": 1, "add_norm": 1, "activation.silu": 1}, "norm.plain"),
    "gemma3": ({"norm.gemma": 3, "activation.gelu_tanh": 1}, "norm.gemma"),
    "qwen3_moe": ({"norm.plain": 1, "add_norm": 1, "activation.silu": 1}, "norm.plain"),
}
"""Calls of a first decoder layer by point, and the point whose heads stay with the engine."""


@feature("several patches of one class of layers", "right", *NORMS, "add_norm")
@pytest.mark.parametrize("model", DECODERS)
def test_a_decoder_layer_of_a_real_model_runs_all_of_them(
    model: str, config: Any, attention: Any
) -> None:
    from vllm.forward_context import set_forward_context

    calls, heads = DECODERS[model]
    layer = decoder(model)
    hidden, slots = torch.randn(TOKENS, 32), torch.tensor([5, 20, 21])
    name = layer.self_attn.attn.layer_name

    def once() -> list[torch.Tensor]:
        layer.self_attn.attn.kv_cache.zero_()
        positions = torch.arange(TOKENS) + 3
        with set_forward_context({name: None}, config, slot_mapping={name: slots}):
            return [each.clone() for each in layer(positions, hidden.clone(), None)]

    own = once()
    kernels = {
        each: dispatcher(OP.name, add_norm, add_norm_guards())
        if each == "add_norm"
        else kernel_of(each)
        for each in calls
    }
    points = []
    try:
        for each, kernel in kernels.items():
            points.append(POINTS[each]())
            points[-1].install(kernel)
            assert survey(points[-1], kernel.guards, layer.modules()).taken
        for given, expected in zip(once(), own, strict=True):
            torch.testing.assert_close(given, expected)
        found = {each: sum(kernel.book.calls.values()) for each, kernel in kernels.items()}
        assert found == calls
        assert dict(kernels[heads].book.fallbacks) == {"rows without one pitch": 2}
    finally:
        for point in points:  # the first first: what they share stays for the rest
            point.remove()
    for given, expected in zip(once(), own, strict=True):
        assert torch.equal(given, expected)


def decoder(model: str) -> Any:
    """A first decoder layer; that of the mixture has a dense MLP, since experts need a GPU."""
    import transformers
    from vllm.model_executor.models import gemma3, qwen3, qwen3_moe

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": SIZE, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    more = {"prefix": "model.layers.0"}
    if model == "gemma3":
        layer = gemma3.Gemma3DecoderLayer(transformers.Gemma3TextConfig(**sizes), **more)
    elif model == "qwen3":
        layer = qwen3.Qwen3DecoderLayer(transformers.Qwen3Config(**sizes), **more)
    else:
        of_model = transformers.Qwen3MoeConfig(**sizes, mlp_only_layers=[0])
        whole = SimpleNamespace(hf_text_config=of_model)
        given = SimpleNamespace(model_config=whole, cache_config=None, quant_config=None)
        layer = qwen3_moe.Qwen3MoeDecoderLayer(given, **more)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    layer.self_attn.attn.kv_cache = empty_cache(layer.self_attn.attn)
    return layer
