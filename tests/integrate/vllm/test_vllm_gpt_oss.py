"""The point in the attention of gpt-oss in the real vLLM, on the CPU: rotation and KV write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_here import config, dispatcher, guards_of, needs_vllm

from patcher.integrate.guards import CallGuards
from patcher.integrate.vllm.points import POINTS

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 16


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
