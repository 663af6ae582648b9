"""Which patch points a model of vLLM has layers for, by its config.json; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from patcher.bench import MissingError, PatcherError, VerificationError
from patcher.bench.engines.architecture import (
    has_cache,
    keeps_state,
    layer_kinds,
    quantization,
    text_part,
)
from patcher.bench.engines.vllm_options import EXPERTS
from patcher.integrate.layers import StepCalls
from patcher.integrate.transformers.places import default_activation, without_weights
from patcher.integrate.vllm.families import RAW_WEIGHTS, architectures
from patcher.integrate.vllm.tree import Tree

_MOE = "FusedMoE|FusedMoEFactory"
_MXFP4 = "mxfp4"
_LINEAR = "RowParallelLinear|ColumnParallelLinear|ReplicatedLinear"
_HEAD_NORMS = "q_norm|q_layernorm|query_layernorm", "k_norm|k_layernorm|key_layernorm"
"""The attributes that hold the norms of heads of query and key."""
_ALL_LINEAR = ("awq", "fp8", "gptq")
"""Formats of all linear layers."""
_SPARED = "ignored_layers", "modules_to_not_convert", "dynamic", "modules_in_block_to_quantize"
"""What such a format calls layers that it treats in another way."""
_OF_EXPERTS = re.compile(r"(.*\.)?experts\.")
_BY_NAME = "get_act_and_mul_fn"
"""Builds the activation that a config.json names."""


@dataclass(frozen=True)
class RoleLayers:
    """How vLLM's model files build the layers of a patch point's role."""

    names: tuple[str, ...]
    """What they refer to, all of which a model needs; `A|B` is either of two names, as where a
    version renamed one."""
    weights: str | None = None
    """The `quant_method` of the checkpoints whose layers it takes; None for plain weights."""
    activations: tuple[str, ...] = ()
    """The activations that it takes, by their names in a config.json; empty for any."""
    settings: tuple[tuple[str, object], ...] = ()
    """What a config.json has to say where it says anything."""
    instead: tuple[tuple[str, object], ...] = ()
    """What a config.json may say in place of the last of `names`."""
    plain: bool = False
    """Whether linear layers that are quantised are none of its own."""
    plain_experts: bool = False
    """Whether experts that are quantised are none of its own."""
    counted: Literal["attention", "experts", "state", "step"] | None = None
    """What a step of decode has one call for: each layer with a KV cache, with experts, or with a
    state in place of a cache, or the step itself; None where a config.json does not tell."""


LAYERS: Mapping[str, RoleLayers] = {
    "activation.gelu": RoleLayers((f"GeluAndMul|{_BY_NAME}",), None, ("gelu",)),
    "activation.gelu_tanh": RoleLayers((f"GeluAndMul|{_BY_NAME}",), None, ("gelu_pytorch_tanh",)),
    "activation.silu": RoleLayers((f"SiluAndMul|{_BY_NAME}",), None, ("silu", "swish")),
    "add_norm": RoleLayers(("RMSNorm",)),
    "add_norm_route": RoleLayers(
        (_MOE, "RMSNorm", "GateLinear|ReplicatedLinear"), _MXFP4, counted="experts"
    ),
    "decode_attention": RoleLayers(("Attention",), counted="attention"),
    "decode_attention.fp8": RoleLayers(("Attention",), counted="attention"),
    "embed_norm": RoleLayers(("VocabParallelEmbedding", "RMSNorm"), counted="step"),
    "experts.down.mxfp4": RoleLayers((_MOE,), _MXFP4, counted="experts"),
    "experts.fp8_block": RoleLayers((_MOE,), "fp8", counted="experts"),
    "experts.gate_up.mxfp4": RoleLayers((_MOE,), _MXFP4, counted="experts"),
    "experts.plain": RoleLayers((_MOE,), counted="experts", plain_experts=True),
    "experts.sum.oai": RoleLayers((_MOE,), _MXFP4, counted="experts"),
    "experts_to_norm": RoleLayers((_MOE, "RMSNorm"), _MXFP4, counted="experts"),
    "gated_delta": RoleLayers(("QwenGatedDeltaNetAttention",), counted="state"),
    "norm.gemma": RoleLayers(("GemmaRMSNorm",)),
    "linear": RoleLayers((_LINEAR,), plain=True),
    "linear_fp8": RoleLayers((_LINEAR,), "fp8"),
    "lm_head": RoleLayers(("ParallelLMHead",), counted="step"),
    "lm_head.greedy": RoleLayers(("LogitsProcessor",), counted="step"),
    "mamba2_decode": RoleLayers(("MambaMixer2",), counted="state"),
    "mla_decode": RoleLayers(
        ("MLAAttention|MultiHeadLatentAttentionWrapper",), counted="attention"
    ),
    "moe_block": RoleLayers(
        (_MOE, "RMSNorm", "GateLinear|ReplicatedLinear"), _MXFP4, counted="experts"
    ),
    "norm.plain": RoleLayers(("RMSNorm",)),
    "qk_norm_rope": RoleLayers(("get_rope", "RMSNorm", *_HEAD_NORMS), counted="attention"),
    "qkv_rope_kv": RoleLayers(
        ("Attention", "get_rope", "QKVParallelLinear"), plain=True, counted="attention"
    ),
    "quantize_fp8": RoleLayers((_LINEAR,), "fp8"),
    "rms_norm_quant_fp8": RoleLayers((_LINEAR, "RMSNorm"), "fp8"),
    "rope_kv": RoleLayers(("Attention", "get_rope"), counted="attention"),
    "router.grouped_topk": RoleLayers(
        (_MOE, f"e_score_correction_bias|expert_bias|{RAW_WEIGHTS}"),
        instead=(("norm_topk_prob", False),),
        counted="experts",
    ),
    "router.oai": RoleLayers((_MOE,), _MXFP4, counted="experts"),
    "router.topk": RoleLayers((_MOE,), settings=(("norm_topk_prob", True),), counted="experts"),
    "sampler.greedy": RoleLayers(("LogitsProcessor",), counted="step"),
    "sampler.top_k_top_p": RoleLayers(("LogitsProcessor",), counted="step"),
}
"""By the name of the patch point."""


def of_model(point: str, config: Callable[[], Mapping[str, Any]]) -> str:
    """How the installed vLLM builds the layers of a patch point for a model.

    The files of models are read, not run: a model may leave out a layer that it refers to.

    Args:
        point: the point's name.
        config: reads the model's config.json.

    Raises:
        MissingError: vLLM is not installed.
        VerificationError: the model has none; the message says why.
    """
    tree, layers, model = Tree.installed(), LAYERS[point], config()
    names = _named(model)
    known = architectures(tree, names)
    if not known:
        raise VerificationError(
            f"vLLM {tree.version()} has no model {' or '.join(names) or 'without a class'}",
            "see `architectures` in its config.json",
        )
    one, text = next(iter(known.values())), text_part(model)
    others = any(text.get(key) == value for key, value in layers.instead)
    if not one.builds(layers.names[:-1] if others else layers.names):
        raise VerificationError(
            f"{one.name} has no layer of {point}: {one.module} does not refer to "
            f"{' and '.join(layers.names).replace('|', ' or ')}",
            "revert the patch for this model",
        )
    must_fit(point, model)
    found = _activation(model) if layers.activations else None
    if found is not None and found not in layers.activations:
        raise VerificationError(
            f"{point} takes {' or '.join(layers.activations)}, the activation of this {one.name} "
            f"is {found}",
            "revert the patch for this model",
        )
    flat = "; it is flat, so kernels of its own may bypass some of them" if one.is_flat else ""
    return f"{one.name} has layers of {point}, by {one.module}{flat}"


def calls_in_step(point: str, config: Mapping[str, Any], guards: object = None) -> StepCalls | None:
    """How often a step of decode comes by a patch point, by the layers of transformers' model.

    Args:
        point: the point's name.
        config: the model's config.json; `of_model` has found that it has layers of the point.
        guards: not asked, since the sizes of vLLM's layers depend on how many ranks share them.

    Returns:
        The number of calls; None where neither config.json nor transformers tells.
    """
    kind = LAYERS[point].counted
    if kind is None or kind == "step":
        return None if kind is None else StepCalls(1)
    try:
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        model = without_weights(plain)
    except PatcherError:  # vLLM has models that transformers lacks
        return None
    text = model.config.get_text_config(decoder=True)
    if kind == "experts":
        names = (name for name, _ in model.named_parameters())
        holders = {found[1] for found in map(_OF_EXPERTS.match, names) if found}
        return StepCalls(len(holders)) if holders else None
    if not (kinds := layer_kinds(text)):
        return StepCalls(int(text.num_hidden_layers))
    return StepCalls(sum(map(keeps_state if kind == "state" else has_cache, kinds)))


def must_fit(point: str, model: Mapping[str, Any]) -> None:
    """Refuse a model whose config.json states that its layers are others, whatever vLLM has.

    Args:
        point: the point's name.
        model: the model's config.json.

    Raises:
        VerificationError: it does; the message says why.
    """
    layers, name = LAYERS[point], next(iter(_named(model)), "model")
    method = quantization(model).get("quant_method")
    if layers.weights is not None and method != layers.weights:
        raise VerificationError(
            f"{point} takes {layers.weights} weights, those of this {name} are "
            f"{method or 'not quantised'}",
            "revert the patch for this model",
        )
    if layers.plain_experts and method is not None:
        raise VerificationError(
            f"{point} takes plain weights, those of the experts of this {name} are {method}",
            "revert the patch for this model",
        )
    if layers.plain and _all_quantised(model):
        raise VerificationError(
            f"{point} takes plain weights, those of every linear layer of this {name} are {method}",
            "revert the patch for this model",
        )
    text = text_part(model)
    for key, value in layers.settings:
        if text.get(key, value) != value:
            raise VerificationError(
                f"{point} takes {key} {value}, that of this {name} is {text[key]}",
                "revert the patch for this model",
            )


def _all_quantised(model: Mapping[str, Any]) -> bool:
    """Whether a config.json leaves no linear layer plain, as far as it says: routers of experts and
    towers of other senses are left so, and layers that it names."""
    format_of, text = quantization(model), text_part(model)
    return (
        format_of.get("quant_method") in _ALL_LINEAR
        and not any(format_of.get(name) for name in _SPARED)
        and not any(text.get(name) for name in EXPERTS)
        and text is model
    )


def _named(model: Mapping[str, Any]) -> list[str]:
    """The classes that a config.json names; none where it has no list of them."""
    named = model.get("architectures")
    return [str(name) for name in named] if isinstance(named, list | tuple) else []


def _activation(model: Mapping[str, Any]) -> str | None:
    """The activation of a model's MLPs, by its config.json or else its architecture; None if
    neither names one."""
    text = text_part(model)
    found = text.get("hidden_activation") or text.get("hidden_act")
    if found is None and (kind := text.get("model_type")):
        try:
            found = default_activation(str(kind))
        except MissingError:  # the engine's own survey of a loaded model is exact
            return None
    return None if found is None else str(found).lower()
