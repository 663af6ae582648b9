"""What people switch on, or do to a model, with the points of norms, matmuls and both rewrites."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_matrix import feature
from patch_sample import OP, add_norm_guards
from patch_sample import kernel as add_norm
from vllm_attention import (
    HIDDEN,
    PIECEWISE,
    Compiled,
    attention,
    rope_guards,
    rope_kernel,
    step,
)
from vllm_experts import TOKENS, gpt_oss, reduce_add_norm
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm.points import POINTS

__all__ = ("attention", "config", "gpt_oss")  # fixtures of tests here

pytestmark = needs_vllm


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def matmul(x: torch.Tensor, weight: Any, bias: Any, output: torch.Tensor) -> None:
    output.copy_(torch.nn.functional.linear(x, weight, bias if bias.numel() else None))


@contextmanager
def patched(point: str, kernel: Dispatcher) -> Iterator[Dispatcher]:
    installed = POINTS[point]()
    installed.install(kernel)
    try:
        yield kernel
    finally:
        installed.remove()
        kernel.close()


def kernel_of(point: str) -> Dispatcher:
    if point == "add_norm":
        return dispatcher(OP.name, add_norm, add_norm_guards())
    return dispatcher("linear", matmul, guards_of("linear", T=torch.float32))


class Layer:
    """One layer of a point's role, and a call of it that changes nothing of the caller's."""

    def __init__(self, point: str) -> None:
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.linear import ReplicatedLinear
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.point = point
        if point == "add_norm":
            self.module: Any = RMSNorm(64, eps=1e-5, dtype=torch.float32)
        elif point == "linear":
            self.module = ReplicatedLinear(
                64, 64, bias=True, params_dtype=torch.float32, return_bias=False
            )
        else:
            self.module = ParallelLMHead(64, 64, params_dtype=torch.float32)
        for parameter in self.module.parameters():
            parameter.data.uniform_(0.5, 2.0)
        if point != "add_norm":
            dispatch_cpu_unquantized_gemm(self.module, remove_weight=False)
        self.x, self.residual = torch.randn(3, 64), torch.randn(3, 64)

    def __call__(self, module: Any = None, x: torch.Tensor | None = None) -> torch.Tensor:
        module = self.module if module is None else module
        x = (self.x if x is None else x).clone()
        if self.point == "add_norm":
            result: torch.Tensor = module(x, self.residual.expand_as(x).clone())[0]
        elif self.point == "linear":
            result = module(x)
        else:
            result = module.quant_method.apply(module, x)
        return result


def in_place(layer: Any) -> None:
    layer.weight.data.mul_(3)


def new_data(layer: Any) -> None:
    layer.weight.data = layer.weight.data * 3


def new_parameter(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data * 3, requires_grad=False)


def loaded(layer: Any) -> None:
    given = {name: value * 3 for name, value in layer.state_dict().items()}
    layer.load_state_dict(given)


LAYERS = ("add_norm", "linear", "lm_head")


@feature("new weights: in place, `.data`, a new Parameter", "right", *LAYERS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [in_place, new_data, new_parameter, loaded])
@pytest.mark.parametrize("point", LAYERS)
def test_new_weights_count(
    point: str, change: Callable[[Any], None], compiled: bool, config: Any
) -> None:
    layer = Layer(point)
    old = layer()
    with patched(point, kernel_of(point)) as kernel:
        run: Any = torch.compile(layer, backend="eager") if compiled else layer
        torch.testing.assert_close(run(), old)
        change(layer.module)
        new = run()
        assert sum(kernel.book.calls.values()) == 2
        assert not kernel.book.fallbacks
    torch.testing.assert_close(new, layer())
    assert not torch.allclose(new, old)


@feature("a hook on a layer", "right", "add_norm", "linear")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("point", ["add_norm", "linear"])
def test_what_a_hook_changes_counts(point: str, later: bool, compiled: bool, config: Any) -> None:
    def hook(module: Any, args: Any, result: Any) -> Any:
        return (result[0] + 1, result[1]) if isinstance(result, tuple) else result + 1

    layer = Layer(point)
    plain = layer()
    if not later:
        layer.module.register_forward_hook(hook)
    with patched(point, kernel_of(point)) as kernel:
        if later:
            layer.module.register_forward_hook(hook)
        run: Any = torch.compile(layer, backend="eager") if compiled else layer
        torch.testing.assert_close(run(), plain + 1)
        assert sum(kernel.book.calls.values()) == 1


@feature("weights offloaded: prefetch, or without UVA", "right", "add_norm", "linear")
@pytest.mark.parametrize("point", ["add_norm", "linear"])
def test_offloaded_weights_are_those_that_were_brought(point: str, config: Any) -> None:
    """As vLLM's offloader without UVA, whose forward brings the weights of a layer."""
    from torch.func import functional_call

    layer = Layer(point)
    expected = layer()
    block = torch.nn.Sequential()
    block.norm = layer.module
    kept = copy.copy(block.state_dict())
    for parameter in block.parameters():
        parameter.data = torch.zeros_like(parameter.data)
    block.forward = lambda *args: layer.module(*args)  # type: ignore[method-assign]

    def brought(*args: Any) -> Any:
        return functional_call(block, kept, args)

    with patched(point, kernel_of(point)) as kernel:
        found = brought(layer.x.clone(), *[layer.residual.clone()] * (point == "add_norm"))
        torch.testing.assert_close(found[0] if point == "add_norm" else found, expected)
        assert sum(kernel.book.calls.values()) == 1


@feature("`deepcopy` of a layer", "right", "add_norm", "lm_head")
@pytest.mark.parametrize("point", ["add_norm", "lm_head"])  # vLLM's linear layers allow none
def test_a_copy_runs_with_weights_of_its_own(point: str, config: Any) -> None:
    layer = Layer(point)
    with patched(point, kernel_of(point)) as kernel:
        layer()
        other = copy.deepcopy(layer.module)
        in_place(other)
        found, own = layer(other), layer()
        assert sum(kernel.book.calls.values()) == 3
    torch.testing.assert_close(found, layer(other))
    torch.testing.assert_close(own, layer())


@feature("`model_impl='transformers'`", "falls back", "add_norm")
def test_a_norm_that_has_an_axis_for_the_batch_is_the_engines(config: Any) -> None:
    layer = Layer("add_norm")
    x = torch.randn(1, 3, 64)
    expected = layer(x=x)
    with patched("add_norm", kernel_of("add_norm")) as kernel:
        torch.testing.assert_close(layer(x=x), expected)
    assert dict(kernel.book.fallbacks) == {"input has 3 axes": 1}


@feature("LoRA on linear layers", "right", "linear")
def test_lora_is_added_to_what_the_kernel_gives(config: Any) -> None:
    from vllm.lora.layers import ReplicatedLinearWithLoRA

    class Punica:
        """In the place of vLLM's kernels: one adapter for all tokens."""

        def add_lora_linear(self, y: Any, x: Any, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
            y += x @ a[0][0, 0].t() @ b[0][0, 0].t()
            return y

    layer = Layer("linear")
    wrapper = ReplicatedLinearWithLoRA(layer.module)
    made = {"max_lora_rank": 8, "lora_dtype": torch.float32, "fully_sharded_loras": False}
    wrapper.create_lora_weights(1, SimpleNamespace(**made))
    wrapper.punica_wrapper = Punica()
    wrapper.set_lora(0, torch.randn(8, 64), torch.randn(64, 8))
    expected = layer(wrapper)
    assert not torch.allclose(expected, layer())
    with patched("linear", kernel_of("linear")) as kernel:
        torch.testing.assert_close(layer(wrapper), expected)
    assert sum(kernel.book.calls.values()) == 1


@feature("both graph rewrites in one graph", "right", "rope_kv", "experts_to_norm", "add_norm")
@pytest.mark.parametrize("order", ["as listed", "reversed"])
def test_both_rewrites_of_a_graph_are_made(
    order: str, config: Any, attention: Any, gpt_oss: Any
) -> None:
    """vLLM's gpt-oss with its own attention: rotations and experts of one graph."""
    from vllm.forward_context import set_forward_context

    model = gpt_oss()
    for index, layer in enumerate(model.layers):
        layer.attn = attention("gpt_oss", f"model.layers.{index}.attn")
    caches = [layer.attn.attn for layer in model.layers]
    names = [each.layer_name for each in caches]
    slots = dict.fromkeys(names, torch.tensor([5, -1, 20, 21, 6]))

    def once(run: Any) -> list[torch.Tensor]:
        for each in caches:
            each.kv_cache.zero_()
        given = {"input_ids": torch.arange(TOKENS), "positions": torch.arange(TOKENS) + 3}
        with set_forward_context(dict.fromkeys(names), config, slot_mapping=slots):
            result: torch.Tensor = run(**given)
        return [result.clone(), *(each.kv_cache.clone() for each in caches)]

    expected = once(model.forward)
    dtypes = {"I": torch.int32, "T": torch.float32, "W": torch.float32}
    guards = guards_of("reduce_add_rms_norm", **dtypes)
    kernels = {
        "rope_kv": dispatcher("rope_kv_update", rope_kernel, rope_guards()),
        "experts_to_norm": dispatcher(
            "reduce_add_rms_norm",
            reduce_add_norm,
            replace(guards, scalars=(("epsilon", float),)),
        ),
        "add_norm": kernel_of("add_norm"),
    }
    with ExitStack() as stack:
        for point in list(kernels)[:: 1 if order == "as listed" else -1]:
            stack.enter_context(patched(point, kernels[point]))
        run = Compiled(model.forward, PIECEWISE)
        for _ in range(2):
            torch.testing.assert_close(once(run), expected)
    calls = {point: sum(kernel.book.calls.values()) for point, kernel in kernels.items()}
    # of both layers twice; the norms that are left follow attention
    assert calls == dict.fromkeys(kernels, 4)
    assert not any(kernel.book.fallbacks for kernel in kernels.values())


@feature("`VLLM_BATCH_INVARIANT`", "right", "rope_kv")
def test_what_sums_nothing_is_served_where_sums_must_not_depend_on_a_batch(
    config: Any, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, hidden = attention("llama"), torch.randn(TOKENS, HIDDEN)
    slots = torch.tensor([5, -1, 20, 21, 6])
    expected = step(config, layer, hidden, slots)
    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    with patched("rope_kv", kernel):
        found = step(config, layer, hidden, slots, Compiled(layer))
    torch.testing.assert_close(found, expected)
    assert sum(kernel.book.calls.values()) == 1
