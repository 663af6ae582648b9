"""Attention layers of vLLM's own models on the CPU, with doubles for what needs a GPU.

FlashAttention is plain attention to what was written, so that a wrong write shows.
`reshape_and_cache_flash` is a loop that speaks the same protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from vllm_here import guards_of

from patcher.integrate.guards import CallGuards
from patcher.integrate.vllm.engine import kv_caches

BLOCK, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 16, 4, 2, 16, 32
WRITE, ATTEND = "vllm::unified_kv_cache_update", "vllm::unified_attention_with_output"
PIECEWISE = (ATTEND, WRITE)
"""Where vLLM splits graphs by default."""
MODELS = ("gemma3", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe")


def rope_guards() -> CallGuards:
    return guards_of("rope_kv_update", P=torch.int64, T=torch.float32, C=torch.float32)


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
    write(rotated(key), value.view(len(value), -1, cos_sin.shape[1]), key_cache, value_cache, slots)


def write(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any) -> None:
    """`reshape_and_cache_flash`; a cache in fp8 is bytes, of which the largest stands for more."""
    dtype, *scales = rest or ("auto",)
    if dtype in ("fp8", "fp8_e4m3"):
        key, value = (
            (each / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(keys.dtype)
            for each, scale in zip((key, value), scales, strict=True)
        )
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            keys[slot // BLOCK, slot % BLOCK] = key[token]
            values[slot // BLOCK, slot % BLOCK] = value[token]


def attend(
    impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, *rest: Any, **more: Any
) -> Any:
    both = kv_caches(cache, query.shape[-1])
    if both is None:  # while vLLM measures memory
        return more["output"].fill_(0)
    if both[0].dtype == torch.uint8:
        fp8, scales = torch.float8_e4m3fn, (layer._k_scale, layer._v_scale)
        keys, values = (
            half.view(fp8).float() * scale for half, scale in zip(both, scales, strict=True)
        )
        query, both = query.float() * layer._q_scale, (keys, values)
    groups = query.shape[1] // both[0].shape[2]
    keys, values = (half.flatten(0, 1).repeat_interleave(groups, 1) for half in both)
    scores = torch.einsum("thd,shd->ths", query, keys).softmax(-1)
    return more["output"].copy_(torch.einsum("ths,shd->thd", scores, values))


@pytest.fixture
def attention(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the attention layer of one of `MODELS`: `attention(model, prefix, cache_dtype)`; its
    `forward` is FlashAttention's own."""
    import vllm.model_executor.layers.attention.attention as engine
    from vllm.config import CacheConfig
    from vllm.model_executor.layers import rotary_embedding
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import flash_attn

    built, caches = engine.Attention.__init__, {"cache_config": None}

    def __init__(layer: Any, *args: Any, **more: Any) -> None:
        # the choice of a backend, sinks and a cache's configuration need a GPU or a whole model
        more = {name: each for name, each in more.items() if name != "sinks"} | caches
        built(layer, *args, **more, attn_backend=flash_attn.FlashAttentionBackend)

    # layers share their rotations; those that a test changes are its own
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    monkeypatch.setattr(engine.Attention, "__init__", __init__)
    monkeypatch.setattr(type(current_platform), "opaque_attention_op", lambda *_: True)
    forward = flash_attn.FlashAttentionImpl.forward
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", attend)
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write, raising=False)

    # of FlashAttention's versions, which a GPU chooses
    monkeypatch.setattr(
        flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True, raising=False
    )

    def make(
        model: str, prefix: str = "model.layers.0.self_attn", cache_dtype: str | None = None
    ) -> Any:
        caches["cache_config"] = cache_dtype and CacheConfig(cache_dtype=cache_dtype)
        layer = _layer(model, prefix)
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
        layer.attn.kv_cache = empty_cache(layer.attn)
        return layer

    make.forward = forward  # type: ignore[attr-defined]
    yield make
    config.compilation_config.static_forward_context.clear()


def _layer(model: str, prefix: str) -> Any:
    import transformers
    from vllm.model_executor.models import gemma3, gpt_oss, llama, mixtral, qwen3, qwen3_moe

    rope = {"rope_theta": 10_000.0, "rope_type": "default"}
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    names = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    names |= {"head_dim": HEAD_DIM, "num_hidden_layers": 1, "max_position_embeddings": 128}
    kinds: dict[str, tuple[Any, type[Any] | None]] = {
        "gemma3": (gemma3.Gemma3Attention, transformers.Gemma3TextConfig),
        "gpt_oss": (gpt_oss.OAIAttention, transformers.GptOssConfig),
        "llama": (llama.LlamaAttention, transformers.LlamaConfig),
        "mixtral": (mixtral.MixtralAttention, transformers.MixtralConfig),
        "qwen3": (qwen3.Qwen3Attention, None),
        "qwen3_moe": (qwen3_moe.Qwen3MoeAttention, None),
    }
    kind, of_config = kinds[model]
    more = {**sizes, "prefix": prefix, "head_dim": HEAD_DIM, "rope_parameters": rope}
    more |= dict.fromkeys(("max_position", "max_position_embeddings"), 128)
    if of_config is not None:
        names |= {} if model in ("gemma3", "gpt_oss") else {"rope_parameters": rope}
        more["config"] = of_config(**names)
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in more.items() if name in known})


def empty_cache(attention: Any) -> torch.Tensor:
    """A KV cache of two blocks as this version's FlashAttention has it, tokens before heads."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    heads, size = attention.num_kv_heads, attention.head_size
    dtype = torch.uint8 if "fp8" in attention.kv_cache_dtype else torch.float32
    shape_of = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
    if shape_of is not None and len(shape := shape_of(2, BLOCK, heads, size)) == 5:
        return torch.zeros(shape, dtype=dtype)
    packed = torch.zeros(2, BLOCK, heads, 2 * size, dtype=dtype)
    return packed.transpose(1, 2)  # keys and values side by side


def step(config: Any, layer: Any, hidden: Any, slots: Any, run: Any = None) -> torch.Tensor:
    """One forward pass of a layer over tokens, from the fourth position on."""
    from vllm.forward_context import set_forward_context

    layer.attn.kv_cache.zero_()
    name = layer.attn.layer_name
    given = {"hidden_states": hidden, "positions": torch.arange(len(hidden)) + 3}
    with set_forward_context({name: None}, config, slot_mapping={name: slots}):
        result: torch.Tensor = (layer if run is None else run)(**given)
    return result.clone()


class Compiled:
    """A layer compiled as vLLM does it: Dynamo's graph, then `split_graph`."""

    def __init__(
        self,
        layer: Any,
        splitting_ops: Sequence[str] = PIECEWISE,
        rest: Callable[[torch.fx.GraphModule, Any], Any] = lambda module, given: module,
    ) -> None:
        """Compile at the first call; `rest` compiles what was split."""
        self.splitting_ops, self.rest = splitting_ops, rest
        self.graph: list[str] = []
        """What the graph that was split calls, in order."""
        self.cut: list[list[str]] = []
        """What the pieces call that are not compiled."""
        self._run = torch.compile(layer, fullgraph=True, backend=self._compile, dynamic=True)

    def __call__(self, **given: Any) -> Any:
        return self._run(**given)

    def _compile(self, module: torch.fx.GraphModule, given: Any) -> Any:
        from vllm.compilation import backends

        split, items = backends.split_graph(module, list(self.splitting_ops))
        self.graph = calls(module)
        self.cut = [calls(item.graph) for item in items if item.is_splitting_graph]
        return self.rest(split, given)


def calls(module: torch.fx.GraphModule) -> list[str]:
    """The names of what a graph calls, in order."""
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "_qualified_op_name"):
            found.append(node.target._qualified_op_name)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            found.append(node.target.name())
        elif node.op.startswith("call_"):
            found.append(getattr(node.target, "__name__", str(node.target)))
    return found
