"""Rotation and KV write in one call, in the attention layers of the real vLLM, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_sample import Graph
from feature_matrix import feature
from vllm_attention import (
    ATTEND,
    HEAD_DIM,
    HIDDEN,
    MODELS,
    PIECEWISE,
    WRITE,
    Compiled,
    attention,
    empty_cache,
    rope_guards,
    rope_kernel,
    step,
)
from vllm_here import config, dispatcher, needs_vllm

from patcher.bench.judge.contract_observation import observe
from patcher.integrate.counts import GraphWatch
from patcher.integrate.recorders import recorder
from patcher.integrate.vllm.points import POINTS
from patcher.integrate.vllm.roles.rope_graph import MARKS

__all__ = ("attention", "config")  # fixtures of tests here

pytestmark = needs_vllm

TOKENS = 3
SLOTS = torch.tensor([5, -1, 20])
MARKED = {mark.__name__ for mark in MARKS}


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernel() -> Iterator[Any]:
    """The dispatcher of the patch, installed."""
    made = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(made)
    made.point = point  # type: ignore[attr-defined]
    yield made
    point.remove()
    made.close()


def stock(config: Any, layer: Any, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache without the patch's graphs."""
    return step(config, layer, hidden, SLOTS), layer.attn.kv_cache.clone()


def count(kernel: Any) -> int:
    return sum(kernel.book.calls.values())


@pytest.mark.parametrize("model", MODELS)
def test_what_vllm_rotates_and_writes_confirms_the_contract(
    model: str, config: Any, attention: Any, hidden: Any, tmp_path: Path
) -> None:
    layer, file = attention(model), tmp_path / "calls.safetensors"
    expected, written = stock(config, layer, hidden)
    with recorder("vllm", "rope_kv", file) as found:
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, Compiled(layer)), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert (found.seen, found.record().left_out) == (1, {})
    [group] = observe(file).groups
    assert group.finding == "confirmed", group.problem


@pytest.mark.parametrize("model", MODELS)
def test_one_call_rotates_and_writes_in(
    model: str, config: Any, attention: Any, hidden: Any
) -> None:
    layer = attention(model)
    expected, written = stock(config, layer, hidden)
    plain = Compiled(layer)
    step(config, layer, hidden, SLOTS, plain)
    for _ in range(2):  # in, out and in again
        torch._dynamo.reset()
        kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
        point = POINTS["rope_kv"]()
        point.install(kernel)
        run = Compiled(layer)
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
        torch.testing.assert_close(layer.attn.kv_cache, written)
        assert count(kernel) == 1
        assert not kernel.book.fallbacks
        # both in one piece: between them nothing is compiled or recorded
        assert run.cut == [[f"patcher::rope_kv_{kernel.book.digest}", ATTEND]]
        assert not MARKED & {*run.graph}
        assert WRITE not in run.graph
        assert len(run.graph) < len(plain.graph)

        point.remove()
        point.remove()
        kernel.close()
        # code that was compiled with it runs vLLM's own rotation and write
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
        torch.testing.assert_close(layer.attn.kv_cache, written)
        assert count(kernel) == 1
        torch._dynamo.reset()
        again = Compiled(layer)
        step(config, layer, hidden, SLOTS, again)
        assert again.graph == plain.graph


def test_the_same_patch_can_be_put_in_twice(config: Any, attention: Any, hidden: Any) -> None:
    layer = attention("llama")
    expected, _ = stock(config, layer, hidden)
    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    run = Compiled(layer)
    for number in (1, 2):
        point = POINTS["rope_kv"]()
        point.install(kernel)
        torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
        assert count(kernel) == number
        point.remove()


@feature("whole graphs, `use_inductor_graph_partition`", "right", "rope_kv")
def test_graphs_are_only_cut_at_it_where_vllm_cuts_at_the_write(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("qwen3")
    for splitting_ops, cut in (((ATTEND,), [[ATTEND]]), ((), [])):
        torch._dynamo.reset()
        run = Compiled(layer, splitting_ops)
        step(config, layer, hidden, SLOTS, run)
        assert run.cut == cut
        assert f"patcher::rope_kv_{kernel.book.digest}" in run.graph
    assert count(kernel) == 2


def test_calls_that_the_kernel_does_not_take_are_vllms_own(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("gpt_oss")
    run = Compiled(layer)
    # while vLLM measures memory there is neither cache nor slots
    layer.attn.kv_cache, cache = torch.zeros(0), layer.attn.kv_cache
    step(config, layer, hidden, None, run)
    layer.attn.kv_cache = cache
    short = step(config, layer, hidden, SLOTS[:2], run)
    written = cache.clone()
    torch.testing.assert_close(short, step(config, layer, hidden, SLOTS[:2]))
    torch.testing.assert_close(cache, written)
    # the layer changed after its graph was compiled
    layer.attn.kv_cache_dtype = "fp8"
    torch.testing.assert_close(
        step(config, layer, hidden, SLOTS, run), step(config, layer, hidden, SLOTS)
    )
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {
        "no KV cache yet": 1,
        "shapes that do not fit: tokens": 1,
        "KV cache of fp8": 1,
        "outside vLLM's compiled graphs": 2,
    }


def without_whole_rotation(layer: Any) -> None:
    kind, half = type(layer.rotary_emb), HEAD_DIM // 2
    layer.rotary_emb = kind(HEAD_DIM, half, 128, 10_000.0, True, torch.float32)


def without_halves(layer: Any) -> None:
    layer.rotary_emb.is_neox_style = False


def with_fp8_cache(layer: Any) -> None:
    layer.attn.kv_cache_dtype = "fp8_e4m3"


def with_cache_of_another_layer(layer: Any) -> None:
    layer.attn.kv_sharing_target_layer_name = "model.layers.7.self_attn.attn"


def with_context_parallelism(layer: Any) -> None:
    layer.attn.impl.dcp_world_size = 2


def with_scales(layer: Any) -> None:
    layer.attn.calculate_kv_scales = True


def with_bypass(layer: Any) -> None:
    layer.attn.kv_cache_update_bypass = True


def with_another_attention(layer: Any) -> None:
    own = type(layer.attn.impl)
    layer.attn.impl.__class__ = type("OtherImpl", (own,), {})


def with_hook_after_the_rotation(layer: Any) -> None:
    layer.rotary_emb.register_forward_hook(lambda layer, given, out: (out[0] + 1, out[1]))


def with_hook_before_attention(layer: Any) -> None:
    layer.attn.register_forward_pre_hook(lambda layer, given: (given[0] * 2, *given[1:]))


def with_rotation_twice(layer: Any) -> None:
    rotate = layer.rotary_emb
    layer.rotary_emb = Twice(rotate)


class Twice(torch.nn.Module):
    """A rotation of what was rotated."""

    def __init__(self, rotate: Any) -> None:
        super().__init__()
        self.rotate = rotate

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        return self.rotate(positions, *self.rotate(positions, query, key))


class Gated(Twice):
    """A model that needs the query as it was before the rotation."""

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        rotated, key = self.rotate(positions, query, key)
        return rotated * query.sigmoid(), key


class KeyKept(Twice):
    """A rotation of the query alone, as with the cache of another layer."""

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        return self.rotate(positions, query, None)[0], key


def with_gate(layer: Any) -> None:
    layer.rotary_emb = Gated(layer.rotary_emb)


def without_key(layer: Any) -> None:
    layer.rotary_emb = KeyKept(layer.rotary_emb)


LEFT = {
    without_whole_rotation: "a rotation of a part of the head",
    without_halves: "another kind of rotation",
    with_fp8_cache: "KV cache of fp8_e4m3",
    with_cache_of_another_layer: "no KV write and attention follow the rotation",
    with_context_parallelism: "decode context parallelism",
    with_scales: "another kind of attention",
    with_bypass: "a KV cache that the model writes itself",
    with_another_attention: "attention by OtherImpl",
    with_hook_after_the_rotation: "no KV write and attention follow the rotation",
    with_hook_before_attention: "no KV write and attention follow the rotation",
    with_gate: "no KV write and attention follow the rotation",
    without_key: "no key",
}


FEATURES = {
    with_fp8_cache: "FP8 KV cache",
    with_cache_of_another_layer: "shared KV cache",
    with_context_parallelism: "decode context parallelism",
    with_scales: "KV scales",
    with_another_attention: "FlashInfer, Triton or Flex attention",
    with_hook_before_attention: "a hook on attention",
    with_hook_after_the_rotation: "a hook on the rotation",
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(each, marks=feature(FEATURES[each], "falls back", "rope_kv"))
        if each in FEATURES
        else each
        for each in LEFT
    ],
)
def test_another_rotation_is_compiled_as_without_the_patch(
    change: Any, config: Any, attention: Any, hidden: Any
) -> None:
    # vLLM may change a layer in its first forward pass, so each is run once
    other, layer = (attention("llama", f"model.layers.{index}.self_attn") for index in range(2))
    layer.rotary_emb = copy.deepcopy(other.rotary_emb)  # they share one
    plain = Compiled(other)
    change(other)
    expected = step(config, other, hidden, SLOTS, plain)
    torch._dynamo.reset()
    change(layer)
    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(kernel)
    try:
        run = Compiled(layer)
        assert torch.equal(step(config, layer, hidden, SLOTS, run), expected)
        assert run.graph == plain.graph
        assert run.cut == plain.cut
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {LEFT[change]: 1}
    finally:
        point.remove()


def test_a_layer_built_with_an_fp8_cache_rounds_and_writes_itself(
    config: Any, attention: Any, hidden: Any
) -> None:
    other, layer = (
        attention("llama", f"model.layers.{index}.self_attn", "fp8") for index in range(2)
    )
    for each in (other, layer):
        for name in ("q", "k", "v"):
            getattr(each.attn, f"_{name}_scale").fill_(0.01)
    plain = Compiled(other)
    expected = step(config, other, hidden, SLOTS, plain)
    assert other.attn.kv_cache.dtype == torch.uint8
    assert other.attn.kv_cache.any()
    torch._dynamo.reset()
    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(kernel)
    try:
        run = Compiled(layer)
        assert torch.equal(step(config, layer, hidden, SLOTS, run), expected)
        assert torch.equal(layer.attn.kv_cache, other.attn.kv_cache)
        assert run.graph == plain.graph
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"KV cache of fp8": 1}
        assert point.applies(layer) == "KV cache of fp8"
    finally:
        point.remove()


def test_of_two_rotations_in_a_row_the_second_is_fused(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("llama")
    with_rotation_twice(layer)
    expected, written = stock(config, layer, hidden)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, Compiled(layer)), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert count(kernel) == 1
    assert kernel.book.fallbacks["no KV write and attention follow the rotation"] == 1


class Twofold(torch.nn.Module):
    """Two attentions whose queries are of one projection: each rotates the same tensor."""

    def __init__(self, layer: Any, second: Any) -> None:
        super().__init__()
        self.layer, self.second = layer, second

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        qkv, _ = self.layer.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.layer.q_size, self.layer.kv_size, self.layer.kv_size], dim=-1)
        first = self.layer.attn(*self.layer.rotary_emb(positions, q, k), v)
        return first + self.second.attn(*self.second.rotary_emb(positions, q, k), v)


def test_what_is_read_again_is_not_rotated_in_place(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    from vllm.forward_context import set_forward_context

    layer, second = attention("llama"), attention("llama", "model.layers.1.self_attn")
    both = Twofold(layer, second)
    names = [one.attn.layer_name for one in (layer, second)]

    def run(forward: Any) -> torch.Tensor:
        context = dict.fromkeys(names)
        slots = dict.fromkeys(names, SLOTS)
        with set_forward_context(context, config, slot_mapping=slots):
            out: torch.Tensor = forward(positions=torch.arange(TOKENS) + 3, hidden_states=hidden)
        return out.clone()

    expected = run(both)
    torch.testing.assert_close(run(Compiled(both)), expected)
    # the second is the last to read it
    assert count(kernel) == 1
    assert kernel.book.fallbacks["the tensors before the rotation are used again"] == 1


class KeyIsValue(torch.nn.Module):
    """A model whose values are its keys before the rotation."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        qkv, _ = self.layer.qkv_proj(hidden_states)
        q, k, _ = qkv.split([self.layer.q_size, self.layer.kv_size, self.layer.kv_size], dim=-1)
        return self.layer.attn(*self.layer.rotary_emb(positions, q, k), k)


def test_a_key_that_is_the_value_is_not_rotated_in_place(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("llama")
    model = KeyIsValue(layer)
    expected = step(config, layer, hidden, SLOTS, model)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, Compiled(model)), expected)
    assert not kernel.book.calls
    assert kernel.book.fallbacks["query, key and value share memory"] == 1


def test_a_rotation_of_the_graphs_own_inputs_is_left(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("llama")
    sizes = (layer.q_size, layer.kv_size, layer.kv_size)
    tensors = [torch.randn(TOKENS, size) for size in sizes]

    class Rest(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.rotary_emb = layer.attn, layer.rotary_emb

        def forward(self, positions: Any, hidden_states: Any) -> Any:
            q, k, v = hidden_states
            return self.attn(*self.rotary_emb(positions, q, k), v)

    rest = Rest()
    before = [tensor.clone() for tensor in tensors]

    def forward(positions: Any, hidden_states: Any, run: Any = rest) -> Any:
        return run(positions=positions, hidden_states=tensors)

    expected = step(config, layer, hidden, SLOTS, forward)
    compiled = Compiled(rest)
    got = step(config, layer, hidden, SLOTS, lambda **given: forward(**given, run=compiled))
    torch.testing.assert_close(got, expected)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    assert not kernel.book.calls
    assert kernel.book.fallbacks["the tensors before the rotation are used again"] == 1


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets a layer rotate by vLLM's C kernel, whose double is a loop-free one in PyTorch."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def rotate(positions: Any, query: Any, key: Any, size: int, table: Any, neox: bool) -> None:
        rotated = RotaryEmbedding.forward_static(
            positions, query, key, size, table.shape[1], table, neox
        )
        query.copy_(rotated[0])
        key.copy_(rotated[1])

    library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size,"
        " Tensor cos_sin_cache, bool is_neox) -> ()"
    )
    library.impl("rotary_embedding", rotate, "CompositeExplicitAutograd")
    library.impl("rotary_embedding", lambda *args: None, "Meta")

    def use(layer: Any) -> None:
        layer.rotary_emb._forward_method = layer.rotary_emb.forward_cuda

    yield use
    library._destroy()


def test_a_rotation_by_vllms_kernel_is_fused_as_well(
    in_place: Any, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("qwen3")
    expected, written = stock(config, layer, hidden)
    in_place(layer)
    run = Compiled(layer)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    torch.testing.assert_close(layer.attn.kv_cache, written)
    assert count(kernel) == 1
    assert "_C::rotary_embedding" not in run.graph

    torch._dynamo.reset()
    layer.attn.kv_cache_dtype = "fp8"
    run = Compiled(layer)
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    assert "_C::rotary_embedding" in run.graph
    assert count(kernel) == 1


def in_one_graph(kernel: Any, *, kept: bool) -> tuple[Any, list[str]]:
    """Inductor as vLLM sets it, without vLLM's passes but `keep_in_place`; and what it makes."""
    from torch._inductor import compile_fx
    from torch._inductor.utils import run_and_get_code

    from patcher.integrate.vllm.roles.rope_graph import keep_in_place

    overload = getattr(torch.ops.patcher, f"rope_kv_{kernel.book.digest}").default
    made: list[str] = []

    def rest(module: torch.fx.GraphModule, given: Any) -> Any:
        return compile_fx.compile_fx(
            module,
            given,
            config_patches={
                "enable_auto_functionalized_v2": False,
                "fx_graph_cache": False,
                "post_grad_custom_post_pass": (
                    (lambda graph: keep_in_place(graph, overload)) if kept else None
                ),
            },
        )

    def run(call: Any) -> Any:
        result, code = run_and_get_code(call)
        made.extend(code)
        return result

    return (rest, run), made


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_in_one_graph_inductor_copies_neither_query_nor_key(
    model: str, config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention(model)
    expected, written = stock(config, layer, hidden)
    kernels = []
    for kept in (True, False):
        torch._dynamo.reset()
        (rest, run), code = in_one_graph(kernel, kept=kept)
        compiled = Compiled(layer, (), rest)
        got = run(lambda compiled=compiled: step(config, layer, hidden, SLOTS, compiled))
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(layer.attn.kv_cache, written)
        text = "\n".join(code)
        assert f"rope_kv_{kernel.book.digest}" in text
        kernels.append(text.count("async_compile.cpp_pybinding"))
    assert count(kernel) == 2
    if model == "llama":  # nothing is left between projection and attention
        assert kernels[0] == 0
        assert kernels[1] > 0
    else:  # the norms
        assert kernels[0] <= kernels[1]


@feature("`enforce_eager`, mode NONE", "falls back", "rope_kv")
def test_outside_of_compiled_graphs_the_rotation_is_vllms_and_counted(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("mixtral")
    step(config, layer, hidden, SLOTS)
    assert not kernel.book.calls
    assert dict(kernel.book.fallbacks) == {"outside vLLM's compiled graphs": 1}
    graph = Graph()
    with GraphWatch([kernel.book], kind=Graph):  # a recording keeps its counts apart
        graph.capture_begin()
        graph.capture_end()
        step(config, layer, hidden, SLOTS)
    assert dict(kernel.book.fallbacks) == {"outside vLLM's compiled graphs": 2}


def test_a_compiler_other_than_vllms_sees_no_marks(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("mixtral")
    expected, _ = stock(config, layer, hidden)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(config, layer, hidden, SLOTS, run), expected)
    assert not kernel.book.calls


@feature("several engines of one process", "right", "rope_kv")
def test_two_engines_of_one_process_have_tables_of_their_own(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    first = attention("llama")
    other = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(other):
        second = attention("llama")
    second.rotary_emb = type(second.rotary_emb)(HEAD_DIM, HEAD_DIM, 128, 99.0, True, torch.float32)
    assert first.attn.layer_name == second.attn.layer_name
    expected = [stock(config, first, hidden)[0], stock(other, second, hidden)[0]]
    assert not torch.allclose(*expected)
    runs = [Compiled(first), Compiled(second)]
    for _ in range(2):
        for which, run, layer, out in zip(
            (config, other), runs, (first, second), expected, strict=True
        ):
            torch.testing.assert_close(step(which, layer, hidden, SLOTS, run), out)
    assert count(kernel) == 4


@feature("new weights: in place, `.data`, a new Parameter", "right", "rope_kv")
def test_new_weights_and_a_new_cache_count(
    config: Any, attention: Any, hidden: Any, kernel: Any
) -> None:
    layer = attention("llama")
    run = Compiled(layer)
    step(config, layer, hidden, SLOTS, run)
    layer.qkv_proj.weight.data.mul_(2)
    layer.attn.kv_cache = empty_cache(layer.attn)
    layer.rotary_emb.cos_sin_cache.mul_(0.5)
    torch.testing.assert_close(
        step(config, layer, hidden, SLOTS, run), step(config, layer, hidden, SLOTS)
    )
    assert count(kernel) == 2


def test_a_table_is_rounded_once_and_again_when_it_changes() -> None:
    from patcher.integrate.vllm.roles.rope_operator import RoundedTables

    tables, table = RoundedTables(), torch.rand(8, HEAD_DIM)
    assert tables.rounded(table, torch.float32) is table
    rounded = tables.rounded(table, torch.bfloat16)
    assert torch.equal(rounded, table.bfloat16())
    # another tensor of the same memory, as compiled code may pass it
    assert tables.rounded(table.detach(), torch.bfloat16) is rounded
    assert tables.rounded(table, torch.float16) is not rounded
    table.mul_(2)
    # recorded graphs read the rounded table where it is
    assert tables.rounded(table, torch.bfloat16) is rounded
    assert torch.equal(rounded, table.bfloat16())
    assert len(tables._known) == 2
    del table
    tables.rounded(torch.rand(8, HEAD_DIM), torch.bfloat16)
    assert len(tables._known) == 1


def test_layers_say_whether_they_are_taken(
    config: Any, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CompilationMode

    point = POINTS["rope_kv"]()
    layer = attention("qwen3_moe")
    own = [part for part in layer.modules() if point.of_role(part)]
    assert own == [layer]
    assert point.applies(layer) is None
    for change in (without_whole_rotation, with_fp8_cache):
        other = attention("qwen3_moe", f"model.{change.__name__}.self_attn")
        change(other)
        assert point.applies(other) == LEFT[change]
    monkeypatch.setattr(config.compilation_config, "mode", CompilationMode.NONE)
    assert "no graph" in str(point.applies(layer))


@feature("compiled in pieces, and from the compile cache", "right", "rope_kv")
def test_a_model_as_vllm_compiles_it_runs_the_one_call(
    config: Any, attention: Any, hidden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """By its own wrapper and backend, in pieces; but not by Inductor, whose passes ask for vLLM's
    C kernels."""
    from vllm.compilation.decorators import support_torch_compile
    from vllm.forward_context import set_forward_context

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(config.compilation_config, "backend", "eager")
    monkeypatch.setattr(config.compilation_config, "splitting_ops", list(PIECEWISE))
    monkeypatch.setattr(config.compilation_config, "compile_sizes", [])

    @support_torch_compile(dynamic_arg_dims={"positions": 0, "hidden": 0})
    class Model(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                attention("qwen3", f"model.layers.{index}.self_attn") for index in range(2)
            )

        def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = hidden + layer(positions, hidden)
            return hidden

    def run(model: Any) -> torch.Tensor:
        names = [layer.attn.layer_name for layer in model.layers]
        for layer in model.layers:
            layer.attn.kv_cache.zero_()
        context, slots = dict.fromkeys(names), dict.fromkeys(names, SLOTS)
        with set_forward_context(context, config, slot_mapping=slots):
            out: torch.Tensor = model(torch.arange(TOKENS) + 3, hidden)
        return out.clone()

    model = Model(vllm_config=config)
    assert not model.do_not_compile
    expected = run(_Uncompiled(model))
    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(kernel)
    try:
        for _ in range(2):
            torch.testing.assert_close(run(model), expected)
        assert count(kernel) == 4
        assert not kernel.book.fallbacks
    finally:
        point.remove()


class _Uncompiled:
    """A model that vLLM compiles, called as it is."""

    def __init__(self, model: Any) -> None:
        self.layers, self._model = model.layers, model

    def __call__(self, *args: Any) -> Any:
        return self._model.forward(*args)
