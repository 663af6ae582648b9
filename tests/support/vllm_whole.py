"""Whole small models of the real vLLM: its own classes, its own compilation, its own metadata.

`proven` asks each patch point for its layers in a model, and runs a decode step with the point's
kernel in it. `python -P tests/support/vllm_matrix.py` writes what came of it for all of them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import vllm_here
from patch_sample import kernel as add_norm
from tiny_models import KINDS, MORE, model_of
from vllm_attention import BLOCK
from vllm_gpu import as_on_a_gpu
from vllm_quantised import fp8, mxfp4

from patcher.bench import load_op, presets
from patcher.bench.engines import served_weights, vllm_weights
from patcher.bench.runner.loading import load
from patcher.integrate.activation import contract_guards
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk_group": 1}
"""The head that vLLM's latent attention takes, and what its router asks of a config.json."""
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_routed_experts": 16},
    "glm4_moe_lite": {**LATENT, "head_dim": 64},
    "llama4_text": {"num_experts_per_tok": 1},
}
"""What differs from `tiny_models`."""
PUBLISHED = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "n_group",
    "norm_topk_prob",
    "position_embedding_type",
    "residual_multiplier",
    "rope_parameters",
    "routed_scaling_factor",
    "tie_word_embeddings",
    "topk_group",
)
"""What a small model has of the published one, if a preset knows it: its kind of layers."""
LEFT_OUT = frozenset(("deepseek_v4", "jetmoe", "kimi_linear", "lfm2", "mamba", "rwkv"))
"""Of `tiny_models`: vLLM has no class of its own, or it needs what no double stands for here."""
PLAIN = sorted({*KINDS, *MORE} - LEFT_OUT)
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))],
}
PASSES = ("fuse_norm_quant", "fuse_act_quant")
"""Passes of the compiler that need a GPU, and have something to fuse in models in fp8. A point that
they exclude there is not tried in one."""
QUANTISED: dict[str, tuple[dict[str, Any], Any]] = {
    "deepseek_v3 fp8": (_FP8, fp8),
    "gpt_oss mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
    "qwen3_moe fp8": (_FP8, fp8),
}
"""An architecture and how its weights are quantised: so its config.json says, and the doubles."""
TRIED = [*PLAIN, *QUANTISED]
LENGTHS = (5, 9, 3)
"""Of the requests of a step, the token of the step included; each in a block of its own."""
TOKENS = (3, 77, 200)


@contextmanager
def world() -> Iterator[None]:
    """A world of one process, and the doubles."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import registry
    from vllm.v1.attention import selector

    vllm_here.import_latent_attention()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        patch.setattr(rotary_embedding, "_ROPE_DICT", {})
        # a model's class is looked at in a process of its own, which has no doubles
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        as_on_a_gpu(patch)
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/world", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        try:
            with torch.no_grad():
                yield
        finally:
            selector._cached_get_attn_backend.cache_clear()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@dataclass
class Whole:
    """A model with its configuration."""

    model: Any
    config: Any

    def step(self, at_random: bool = False) -> list[torch.Tensor]:
        """A decode step of three requests, whose caches are random and the same each time.

        Args:
            at_random: sample by top-k and top-p, not greedily.

        Returns:
            The last layer's output, the logits and the tokens.
        """
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        slots = torch.tensor([(i + 1) * BLOCK + n - 1 for i, n in enumerate(LENGTHS)])
        with set_current_vllm_config(self.config):
            metadata = self._metadata(slots)
            with set_forward_context(
                metadata,
                self.config,
                num_tokens=len(TOKENS),
                slot_mapping=dict.fromkeys(metadata, slots),
            ):
                hidden = self.model(
                    input_ids=torch.tensor(TOKENS, dtype=torch.int32),
                    positions=torch.tensor(LENGTHS) - 1,
                )
            logits = self.model.compute_logits(hidden)
            return [hidden, logits.clone(), _sampled(logits, at_random)]

    def _metadata(self, slots: torch.Tensor) -> dict[str, Any]:
        """Fill the caches, and let each layer's backend say what it wants to know of the step."""
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(LENGTHS),
            num_actual_tokens=len(LENGTHS),
            max_query_len=1,
            max_seq_len=max(LENGTHS),
            block_table_tensor=torch.arange(1, 4, dtype=torch.int32)[:, None],
            slot_mapping=slots,
            is_prefilling=torch.zeros(len(LENGTHS), dtype=torch.bool),
            seq_lens_cpu_upper_bound=lengths,
        )
        generator, found = torch.Generator().manual_seed(5), {}
        for name, layer in self.config.compilation_config.static_forward_context.items():
            if isinstance(layer, AttentionLayerBase):
                spec = layer.get_kv_cache_spec(self.config)
                layer.kv_cache = _cache(spec, generator)
                builder = layer.get_attn_backend().get_builder_cls()
                made = builder(spec, [name], self.config, torch.device("cpu"))
                found[name] = made.build(0, common)
        return found


def _sampled(logits: torch.Tensor, at_random: bool) -> torch.Tensor:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows, penalties = len(TOKENS), ("frequency", "presence", "repetition")
    torch.manual_seed(7)
    given = SamplingMetadata(
        temperature=torch.ones(rows) if at_random else None,
        all_greedy=not at_random,
        all_random=at_random,
        top_p=torch.full((rows,), 0.9) if at_random else None,
        top_k=torch.full((rows,), 20, dtype=torch.int32) if at_random else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        **{f"{name}_penalties": torch.zeros(rows) for name in penalties},
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    tokens: torch.Tensor = Sampler()(logits, given).sampled_token_ids
    return tokens


def _cache(spec: Any, generator: torch.Generator) -> Any:
    """As the version's model runner makes it, of a layer, with tokens before heads."""
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    blocks = len(LENGTHS) + 1
    if isinstance(spec, MambaSpec):
        pairs = zip(spec.shapes, spec.dtypes, strict=True)
        return tuple(drawn(blocks, *shape, dtype=dtype) for shape, dtype in pairs)
    if isinstance(spec, MLAAttentionSpec):
        return drawn(blocks, BLOCK, spec.head_size, dtype=spec.dtype)
    packed = drawn(blocks, BLOCK, spec.num_kv_heads, 2 * spec.head_size, dtype=spec.dtype)
    return packed.transpose(1, 2)


def folder_of(folder: Path, name: str) -> str:
    """A folder with the config.json of a small model, one of `TRIED`, with its class's name."""
    kind = name.split()[0]
    sizes = {**{**KINDS, **MORE}[kind], **SIZES.get(kind, {})}
    for preset in presets().values():
        if preset.architecture == kind:
            sizes |= {name: preset.config[name] for name in PUBLISHED if name in preset.config}
    made = model_of(folder / kind, kind, **sizes)
    file = Path(made) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config["architectures"] = [known[kind]]
    if name in QUANTISED:
        config["quantization_config"] = QUANTISED[name][0]
    file.write_text(json.dumps(config), encoding="utf-8")
    return made


def built(folder: str, dtype: str = "float32") -> Whole:
    """The model of a folder, with random weights, compiled in pieces as it is when it is served; a
    compiler that changes nothing stands for Inductor."""
    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch._dynamo.reset()
    rotary_embedding._ROPE_DICT.clear()  # what a patch changes is no other model's
    config = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype=dtype, seed=1, max_model_len=64
        ),
        compilation_config=CompilationConfig(
            mode=3,
            backend="eager",
            custom_ops=["none"],
            compile_sizes=[],
            cudagraph_mode="NONE",
            pass_config=dict.fromkeys(PASSES, False),
        ),
    )
    dtype_of = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype_of:
        model = utils.initialize_model(config)
        served_weights.randomise(model, 1, vllm_weights.layer_types())
        utils.process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return Whole(model, config)


AT_RANDOM = frozenset(("sampler.top_k_top_p",))
"""The points whose kernel samples; other steps are greedy."""


NEAR = {torch.float32: 1e-3, torch.bfloat16: 8 * torch.finfo(torch.bfloat16).eps}
"""How far a step with a patch may be from one without, beside the largest number."""


def kernel_of(name: str) -> Dispatcher:
    """A dispatcher of a point with its op's plain kernel in PyTorch, for whatever its contract
    allows, wherever tensors begin."""
    op = load_op(POINTS[name].op)
    source = op.folder / "solutions" / "cpu_torch" / f"{op.name}.py"
    guards = contract_guards(op.contract, "cpu", op.contract.dtype_choices())
    tensors = tuple(replace(tensor, alignment=1) for tensor in guards.tensors)
    function = load(str(source), "python", op.name) if source.exists() else add_norm
    return vllm_here.dispatcher(op.name, function, replace(guards, tensors=tensors))


def proven(name: str, folder: Path) -> dict[str, str]:
    """By patch point: how many calls of a decode step its kernel took in one of `TRIED`; *of*, out
    of how many, where others fell back.

    Args:
        name: of the model; quantised ones are in bfloat16, as their kernels are.
        folder: for its config.json.

    Raises:
        AssertionError: a step with a patch gives something else than one without.
    """
    _, doubles = QUANTISED.get(name, ({}, None))
    made, dtype = folder_of(folder, name), "float32" if doubles is None else "bfloat16"
    with pytest.MonkeyPatch.context() as patch:
        if doubles is not None:
            doubles(patch)
        own = {at_random: built(made, dtype).step(at_random) for at_random in (False, True)}
        found = {}
        for point in POINTS:
            if name.endswith(" fp8") and {*POINTS[point].fused_by} & {*PASSES}:
                continue
            with vllm_here.patched(point, kernel := kernel_of(point)) as inside:
                whole = built(made, dtype)
                if not survey(inside, kernel.guards, whole.model.modules()).taken:
                    continue
                given = whole.step(point in AT_RANDOM)
            _must_be_near(given, own[point in AT_RANDOM], f"{name}: {point}")
            taken, left = sum(kernel.book.calls.values()), sum(kernel.book.fallbacks.values())
            if taken:
                found[point] = f"{taken} of {taken + left}" if left else str(taken)
    return found


def _must_be_near(given: list[torch.Tensor], own: list[torch.Tensor], name: str) -> None:
    """Compare beside the largest number; the tokens, where logits are equal."""
    *given, tokens = given
    *own, expected = own
    for mine, other in zip(given, own, strict=True):
        part = NEAR[mine.dtype]
        near = {"rtol": part, "atol": part * float(other.abs().max())}
        torch.testing.assert_close(mine, other, **near, msg=lambda why: f"{name}: {why}")
    assert not torch.equal(given[1], own[1]) or torch.equal(tokens, expected), name
