"""The points in gpt-oss of the real vLLM, on the CPU: rotation and KV write in its
attention, and the sum over experts with the norm after it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patch_sample import kernel as add_norm
from vllm_here import config, dispatcher, guards_of, needs_vllm, nothing

from patcher.integrate.guards import AxisBounds, CallGuards
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 16
TOP_K = 2


@pytest.fixture
def attention(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes gpt-oss attention layers of vLLM's own classes, with doubles for what needs a GPU:

    FlashAttention (plain attention to what was written, so that a wrong write shows), and
    `reshape_and_cache_flash` (a loop that speaks the same protocol).
    """
    import transformers
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import gpt_oss
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import flash_attn

    class Layer(gpt_oss.OAIAttention):
        def _build_attention(self, prefix: str, **rest: Any) -> Any:
            # gpt-oss's own, but for the sinks and the choice of a backend, which need a GPU
            return Attention(
                self.num_local_attention_heads,
                self.head_dim,
                self.scaling,
                num_kv_heads=self.num_local_key_value_heads,
                prefix=f"{prefix}.attn",
                attn_backend=flash_attn.FlashAttentionBackend,
            )

    def attend(
        impl: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        cache: Any,
        *rest: Any,
        output: Any,
        **more: Any,
    ) -> Any:
        keys, values = cache[:, 0].flatten(0, 1), cache[:, 1].flatten(0, 1)
        groups = HEADS // KV_HEADS
        scores = torch.einsum("thd,shd->ths", query, keys.repeat_interleave(groups, 1))
        mixed = scores.softmax(-1)
        output.copy_(torch.einsum("ths,shd->thd", mixed, values.repeat_interleave(groups, 1)))
        return output

    def write(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any) -> None:
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                keys[slot // BLOCK, slot % BLOCK] = key[token]
                values[slot // BLOCK, slot % BLOCK] = value[token]

    monkeypatch.setattr(type(current_platform), "opaque_attention_op", lambda *_: True)
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", attend)
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write, raising=False)
    shape = {"hidden_size": 32, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    model = transformers.GptOssConfig(num_hidden_layers=1, head_dim=HEAD_DIM, **shape)

    def make(name: str) -> Any:
        layer = Layer(model, prefix=name)
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
        layer.attn.kv_cache = torch.zeros(2, 2, BLOCK, KV_HEADS, HEAD_DIM)
        return layer

    yield make
    config.compilation_config.static_forward_context.clear()


def step(config: Any, layer: Any, hidden: Any, slots: Any, run: Any = None) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    layer.attn.kv_cache.zero_()
    name = layer.attn.layer_name
    positions = torch.arange(len(hidden)) + 3
    with set_forward_context({name: None}, config, slot_mapping={name: slots}):
        result: torch.Tensor = (layer if run is None else run)(hidden, positions)
    return result


def rope_kernel(  # type: ignore[no-untyped-def]
    positions, query, key, value, bias, cos_sin, slots, key_cache, value_cache
):
    """The contract of rope_kv_update in plain PyTorch."""
    assert bias.numel() == 0
    cos, sin = (half[:, None] for half in cos_sin[positions].chunk(2, -1))

    def rotated(flat: torch.Tensor) -> torch.Tensor:
        a, b = flat.view(len(flat), -1, cos_sin.shape[1]).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    query.copy_(rotated(query).flatten(1))
    keys, values = rotated(key), value.view(len(value), -1, cos_sin.shape[1])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // BLOCK, slot % BLOCK] = keys[token]
            value_cache[slot // BLOCK, slot % BLOCK] = values[token]


def rope_guards() -> CallGuards:
    return guards_of("rope_kv_update", P=torch.int64, T=torch.float32, C=torch.float32)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_rotation_and_write_are_one_call(backend: str | None, config: Any, attention: Any) -> None:
    hidden, slots = torch.randn(3, 32), torch.tensor([5, -1, 20])
    stock = attention("model.layers.0.attn")
    expected = step(config, stock, hidden, slots)
    written = stock.attn.kv_cache.clone()
    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(kernel)
    try:
        layer = attention("model.layers.1.attn")
        run = layer
        if backend is not None:
            run = torch.compile(layer, fullgraph=True, backend=backend)
        torch.testing.assert_close(step(config, layer, hidden, slots, run), expected)
        torch.testing.assert_close(layer.attn.kv_cache, written)
        [label] = kernel.book.calls
        assert label.startswith("rope_kv_update tokens=3 ")
        assert not kernel.book.fallbacks

        # too few slots for the contract, and none at all while memory is measured
        short = step(config, layer, hidden, slots[:2], run)
        torch.testing.assert_close(short[0], step(config, stock, hidden, slots[:2])[0])
        layer.attn.kv_cache, kept = torch.zeros(0), layer.attn.kv_cache
        with pytest.raises(IndexError):  # the double of FlashAttention has nothing to attend to
            step(config, layer, hidden, None, run)
        layer.attn.kv_cache = kept
        assert dict(kernel.book.fallbacks) == {
            "shapes that do not fit: tokens": 1,
            "no KV cache yet": 1,
        }
        # a layer that was built before is left as it was
        assert torch.equal(step(config, stock, hidden, slots), expected)
    finally:
        point.remove()
        kernel.close()
        torch._dynamo.reset()


def test_layers_that_the_contract_is_not_about_are_left_alone(
    config: Any, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.gpt_oss import OAIAttention

    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(kernel)
    try:
        monkeypatch.setattr(OAIAttention, "rope_is_neox_style", False)
        layer = attention("model.layers.2.attn")
        step(config, layer, torch.randn(2, 32), torch.tensor([1, 2]))
        assert not kernel.book.calls
        assert dict(kernel.book.fallbacks) == {"another kind of rotation": 1}
    finally:
        point.remove()
        kernel.close()


def test_graphs_are_cut_at_the_operator_where_vllm_cuts_at_the_write(
    config: Any, attention: Any
) -> None:
    from vllm.compilation import backends

    kernel = dispatcher("rope_kv_update", rope_kernel, rope_guards())
    point = POINTS["rope_kv"]()
    point.install(kernel)
    try:
        layer = attention("model.layers.3.attn")
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        run = torch.compile(layer, fullgraph=True, backend=keep)
        step(config, layer, torch.randn(2, 32), torch.tensor([1, 2]), run)
        attend, write = "vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"

        def cuts(splitting_ops: list[str]) -> list[str]:
            _, items = backends.split_graph(graphs[0], splitting_ops)
            # write and attention in one piece: between them nothing is compiled or recorded
            assert sum(item.is_splitting_graph for item in items) == 1
            names = [
                [
                    n.target.name() if hasattr(n.target, "name") else str(n.target)
                    for n in item.graph.graph.nodes
                    if n.op == "call_function"
                ]
                for item in items
                if item.is_splitting_graph
            ]
            return [name for group in names for name in group]

        ours = f"rope_kv_update_{kernel.book.digest}"
        both = " ".join(cuts([attend, write]))
        assert ours in both
        assert "unified_attention_with_output" in both
        assert ours not in " ".join(cuts([attend]))
        assert ours in graphs[0].code
    finally:
        point.remove()
        kernel.close()
        torch._dynamo.reset()


@pytest.fixture
def gpt_oss(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes gpt-oss models of vLLM's own classes, two layers deep, with doubles for what needs a
    GPU: attention, and the experts, which are linear maps. Those end as vLLM's do, in
    `reduce_grouped` (its double sums in PyTorch), or in a sum of their own.
    """
    import transformers
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.model_executor.models import gpt_oss as engine

    class Attention(torch.nn.Module):
        def __init__(self, config: Any, **rest: Any) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.mix(hidden) + positions.unsqueeze(1)

    class Experts(moe_runner.MoERunner):
        grouped = True

        def __init__(self, num_experts: int, hidden_size: int, prefix: str, **rest: Any) -> None:
            torch.nn.Module.__init__(self)
            sizes = dict.fromkeys(("tp_size", "ep_size", "dp_size", "pcp_size"), 1)
            sizes |= dict.fromkeys(("hidden_dim", "hidden_dim_unpadded"), hidden_size)
            flags = {"is_sequence_parallel": False, "skip_final_all_reduce": False}
            self.moe_config = SimpleNamespace(experts_per_token=TOP_K, **sizes, **flags)
            self.router = self.gate = self._shared_experts = None
            self.routed_input_transform = self.routed_output_transform = None
            self.routed_scaling_factor = 1.0
            self.layer_name = prefix
            self._forward_entry = moe_runner._moe_forward
            self.maps = torch.nn.Parameter(torch.empty(num_experts, hidden_size, hidden_size))
            moe_runner.register_layer_for_moe_forward_op(config, self)

        @property
        def _quant_method(self) -> Any:
            return SimpleNamespace(
                skip_forward_padding=True, has_unpadded_output=False, moe_kernel=None
            )

        def _forward_impl(self, hidden: Any, logits: Any, *rest: Any) -> Any:
            scores, chosen = logits.topk(TOP_K)
            order = chosen.flatten().argsort(stable=True)
            maps = self.maps[chosen.flatten()[order]]
            rows = torch.einsum("rh,rhk->rk", hidden[order // TOP_K], maps)
            rows = rows * scores.softmax(-1).flatten()[order, None]
            index = order.argsort().view(-1, TOP_K).int()
            if not self.grouped:
                return rows[index.long()].sum(1)
            library = sys.modules["triton_kernels.matmul_ogs"]
            plain = library.FusedActivation(), library.Epilogue(library.FnSpecs.default())
            output = torch.full_like(hidden, torch.nan)
            more = {"x_mx_scale": None, "out_dtype": output.dtype}
            summed, _ = library.reduce_grouped(
                rows[None, None], index, output[None], None, *plain, **more
            )
            return summed[0]

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": TOP_K, "vocab_size": 50}
    model = transformers.GptOssConfig(**sizes, **experts)
    monkeypatch.setattr(engine.TransformerBlock, "attention_cls", Attention)
    factory = "FusedMoEFactory" if hasattr(engine, "FusedMoEFactory") else "FusedMoE"
    monkeypatch.setattr(engine, factory, Experts)

    def forget() -> None:
        config.compilation_config.static_forward_context.clear()
        config.compilation_config.static_all_moe_layers.clear()

    def make(grouped: bool) -> Any:
        forget()
        Experts.grouped = grouped
        with monkeypatch.context() as known:
            known.setattr(config, "model_config", SimpleNamespace(hf_config=model))
            made = engine.GptOssModel(vllm_config=config)
        generator = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            parameter.data.normal_(0, 0.2, generator=generator)
        return made

    yield make
    forget()


def reduce_add_norm(rows, row_map, residual, weight, output, epsilon):  # type: ignore[no-untyped-def]
    """The contract of reduce_add_rms_norm in plain PyTorch."""
    some = (row_map >= 0).unsqueeze(-1)
    added = rows[row_map.clamp(min=0).long()].masked_fill(~some, 0.0).sum(1)
    output.copy_(added)
    add_norm(output, residual, weight, epsilon)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("rows", [False, True])
def test_experts_and_the_norm_after_them_are_one_call(
    rows: bool, backend: str | None, config: Any, gpt_oss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.forward_context import set_forward_context

    library = sys.modules["triton_kernels.matmul_ogs"]
    sums: list[int] = []

    def summing(x: Any, index: Any, out: Any, *rest: Any, **more: Any) -> Any:
        sums.append(len(index))
        out[0] = (x[0, 0][index.long()] * (index >= 0).unsqueeze(-1)).sum(1)
        return out, None

    monkeypatch.setattr(library, "reduce_grouped", summing)
    model = gpt_oss(rows)
    tokens, positions = torch.arange(5), torch.arange(5) / 7

    def run(forward: Any) -> Any:
        with set_forward_context(None, config):
            return forward(tokens, positions)

    expected = run(model.forward)
    assert sums == [5, 5] * rows
    sums.clear()
    guards = guards_of("reduce_add_rms_norm", I=torch.int32, T=torch.float32, W=torch.float32)
    guards = replace(guards, scalars=(("epsilon", float),))
    kernel = dispatcher("reduce_add_rms_norm", reduce_add_norm, guards)
    monkeypatch.setattr(POINTS["experts_to_norm"], "find", lambda self: "")
    point = POINTS["experts_to_norm"]()
    point.install(kernel)
    forward = model.forward
    if backend is not None:
        forward = torch.compile(forward, fullgraph=True, backend=backend, dynamic=True)
    try:
        for _ in range(2):
            torch.testing.assert_close(run(forward), expected)
        assert not sums
        label = f"reduce_add_rms_norm tokens=5 hidden=32 top_k={TOP_K} spare=0 float32/int32"
        assert dict(kernel.book.calls) == {label: 4}
        assert not kernel.book.fallbacks
        assert library.reduce_grouped is summing

        # what the kernel may not be given: the sum and the norm of the engine
        kernel._last, kernel._known = (lambda *_: False, kernel._last[1]), {}
        kernel.guards = replace(guards, axes={"hidden": AxisBounds(maximum=16)})
        torch.testing.assert_close(run(forward), expected)
        assert sums == [5, 5]
        assert dict(kernel.book.fallbacks) == {"hidden above 16": 2}
    finally:
        point.remove()
        kernel.close()
        torch._dynamo.reset()
    assert torch.equal(run(model.forward), expected)


def test_the_model_as_vllm_compiles_it_runs_the_one_call(
    config: Any, gpt_oss: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its own wrapper, which looks into the frame of the forward that it compiles; in pieces, as
    ever, but not by Inductor, whose passes ask for vLLM's C kernels."""
    from vllm.forward_context import set_forward_context

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(config.compilation_config, "backend", "eager")
    monkeypatch.setattr(config.compilation_config, "compile_sizes", [])
    tokens, positions = torch.arange(5), torch.arange(5) / 7
    model = gpt_oss(False)
    with set_forward_context(None, config):
        expected = model.forward(tokens, positions)
    guards = guards_of("reduce_add_rms_norm", I=torch.int32, T=torch.float32, W=torch.float32)
    guards = replace(guards, scalars=(("epsilon", float),))
    kernel = dispatcher("reduce_add_rms_norm", reduce_add_norm, guards)
    point = POINTS["experts_to_norm"]()
    point.install(kernel)
    try:
        model = gpt_oss(False)
        assert not model.do_not_compile
        with set_forward_context(None, config):
            for _ in range(2):
                torch.testing.assert_close(model(tokens, positions), expected)
        assert sum(kernel.book.calls.values()) == 4
        assert not kernel.book.fallbacks
    finally:
        point.remove()
        kernel.close()
        torch._dynamo.reset()


def test_a_model_whose_layers_are_looked_at_is_left_alone(
    config: Any, gpt_oss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.forward_context import set_forward_context

    model = gpt_oss(False)
    guards = guards_of("reduce_add_rms_norm", I=torch.int32, T=torch.float32, W=torch.float32)
    kernel = dispatcher("reduce_add_rms_norm", nothing, guards)
    point = POINTS["experts_to_norm"]()
    point.install(kernel)
    try:
        model.aux_hidden_state_layers = (1,)
        with set_forward_context(None, config):
            hidden, seen = model.forward(torch.arange(3), torch.arange(3) / 7)
        assert len(seen) == 1
        assert hidden.isfinite().all()
        assert not kernel.book.calls
    finally:
        point.remove()
        kernel.close()
