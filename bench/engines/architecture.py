"""What an engine is told of a model, and the sizes of it that kernels and caches depend on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.bench.engines.model_config import (
    config_file,
    configuration,
    model_config,
    read_json,
)
from patcher.bench.errors import MissingError, UsageError
from patcher.bench.machine.memory import free_host_bytes
from patcher.bench.presets import Preset, presets
from patcher.bench.workload import Workload, named_model

CPU_PARAMETERS = 1_000_000_000
"""Parameters up to which a model is taken to fit a CPU."""
CPU_BYTES = 6
"""Memory that each parameter of a larger one takes on a CPU: float32, and half as much again for
activations, caches and what is in higher precision for a while."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES, SAMPLE_BYTES = 32, 1 << 16
"""Of each file of weights: what trains, merges or quantises a model changes nearly all of it."""

_STATES = re.compile(r"linear|mamba|recurrent|conv")
_BOTH = "hybrid"
"""A layer with attention and a state, such as Falcon-H1's."""

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
"""What config.json calls the most positions of a sequence, as vLLM reads it: the least counts."""


def causal_model(preset: Preset) -> str:
    """The name of its class, as config.json has it: `GptOssForCausalLM`.

    Raises:
        UsageError: transformers has no causal model of the architecture.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if preset.architecture not in NAMES:
        raise UsageError(
            f"transformers has no causal model of the architecture {preset.architecture!r}",
            f"see `architecture` of the preset {preset.name}",
        )
    return str(NAMES[preset.architecture])


def published_config(model: str) -> dict[str, Any]:
    """What config.json says of a model: its class, its sizes and its quantisation.

    Args:
        model: a preset, a folder with a config.json, such a file, or a Hugging Face id.

    Raises:
        UsageError: there is no such model, or the file is not JSON.
        MissingError: the hub cannot be reached, or asks for an account.
    """
    if known := presets().get(model):
        named = {"architectures": [causal_model(known)], "model_type": known.architecture}
        return {**named, **known.config, **known.published}
    return read_json(config_file(model))


def model_digest(workload: Workload) -> str:
    """Of what the model is read from: a folder's name may stay while what it holds changes.

    config.json counts whole, a folder's weights by samples of each file, and weights of the hub by
    the commit that they come with.

    Raises:
        UsageError, MissingError: as `published_config` and `named_model`.
    """
    found = hashlib.sha256(json.dumps(published_config(workload.model), sort_keys=True).encode())
    if workload.weights != "random":
        folder = config_file(named_model(workload)).parent
        if Path(os.path.expanduser(named_model(workload))).is_dir():
            for file in sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS):
                found.update(f"{file.name} {file.stat().st_size}".encode())
                with file.open("rb") as data:
                    for part in range(SAMPLES):
                        data.seek(file.stat().st_size * part // SAMPLES)
                        found.update(data.read(SAMPLE_BYTES))
        else:
            found.update(folder.name.encode())
    return found.hexdigest()[:12]


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the text decoder: all of it where a model has no other parts.

    Raises:
        UsageError: that is no JSON object.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise UsageError("text_config is no JSON object", "check the model's config.json")
    return text


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the format of quantised weights; empty if they are plain.

    It stands where vLLM looks: at the top, under the older name of compressed-tensors, or in what
    is said of the text decoder.

    Raises:
        UsageError: that is no JSON object.
    """
    for part in (config, text_part(config)):
        for name in ("quantization_config", "compression_config"):
            if found := part.get(name):
                if not isinstance(found, Mapping):
                    raise UsageError(f"{name} is no JSON object", "check the model's config.json")
                return found
    return {}


def own_dtype(workload: Workload) -> str | None:
    """The dtype that its model was published in, such as `float16`; None if config.json has none.

    Raises:
        UsageError, MissingError: as `published_config`.
    """
    config = published_config(named_model(workload))
    for each in (config, text_part(config)):
        if found := each.get("dtype") or each.get("torch_dtype"):
            return str(found).removeprefix("torch.")
    return None


def full_config(model: str) -> dict[str, Any]:
    """A whole config.json of a model, as an engine reads it from a folder.

    Args:
        model: as in `published_config`.

    Raises:
        UsageError, MissingError: as `published_config`; or transformers does not know the preset's
            architecture.
    """
    known = presets().get(model)
    if known is None:
        config = published_config(model)
        return config if config.get("architectures") else {**config, **_class_of(config)}
    whole: dict[str, Any] = configuration(known).to_dict()
    return {**whole, "architectures": [causal_model(known)], **known.published}


def must_fit_cpu(model: str) -> None:
    """Refuse a preset that is too large for a CPU, or a model that its free memory does not hold.

    Raises:
        MissingError: it is.
        UsageError, MissingError: as `model_config`, or transformers cannot build it.
    """
    if known := presets().get(model):
        size, fits = known.parameters_b, known.fits_cpu
    else:
        from patcher.bench.engines.causal_model import skeleton

        shell = skeleton(model_config(model), model)
        count = sum(each.numel() for each in shell.parameters())
        size, fits = count / 1e9, count <= CPU_PARAMETERS or _has_room(count)
    if not fits:
        raise MissingError(
            f"no GPU here, and {model} ({size:.3g} billion parameters) does not fit a CPU",
            "run on a GPU host, read a profile with --from FILE, or try `patcher demo`",
        )


def _has_room(parameters: int) -> bool:
    return parameters * CPU_BYTES <= free_host_bytes()


def longest_context(model: str) -> int | None:
    """Tokens that a sequence may have; None where its config.json does not say, or says -1: any.
    Raises as `published_config`."""
    config = published_config(model)
    text = text_part(config)
    stated = [text[name] for name in LENGTHS if isinstance(text.get(name), int)]
    return min((length for length in stated if length > 0), default=None)


def _class_of(config: dict[str, Any]) -> dict[str, Any]:
    """`architectures`, which a configuration that was saved without a model lacks."""
    from transformers.models.auto import modeling_auto as auto

    kind = str(config.get("model_type"))
    for names in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        if kind in names:
            return {"architectures": [str(names[kind])]}
    return {}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder, as far as its configuration says them."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Elements of the residual stream."""
    inner: int = 0
    """Elements between the matrices of a dense layer."""
    q_heads: int = 0
    """Query heads of a layer; 0 without attention."""
    kv_heads: int = 0
    """Heads of keys and values in a layer."""
    head_dim: int = 0
    """Elements of a head."""
    latent: int = 0
    """Elements that a layer with latent attention (MLA) caches for a token; 0 for others."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that a token goes to."""
    expert_inner: int = 0
    """Elements between the matrices of an expert."""
    has_state: bool = False
    """Whether some layers keep a state in place of keys and values, as Mamba's do."""

    @property
    def cached(self) -> int:
        """Elements that a layer caches for a token."""
        return self.latent or 2 * self.kv_heads * self.head_dim

    @property
    def readers(self) -> tuple[int, ...]:
        """Rows of the matrices that read the residual stream: of queries, keys and values, of the
        router or of a dense layer."""
        attention = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        return tuple(filter(None, sorted({attention, self.experts or 2 * self.inner})))

    def axes(self, of: Container[str] = ()) -> dict[str, int]:
        """Sizes by the axis names of the op contracts, where the model has them.

        Args:
            of: the axes of an op, which tell what its `inner` is: of experts; of the matrix behind
                attention, whose `outer` is the residual stream; or else the residual stream.
        """
        named = {
            "hidden": self.hidden,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "group": self.q_heads // self.kv_heads if self.kv_heads else 0,
            "head_dim": self.head_dim,
            "experts": self.experts,
            "n_experts": self.experts,
            "top_k": self.experts_per_token,
            "intermediate": self.inner,
        }
        if "experts" in of:
            named["inner"] = self.expert_inner
        elif "outer" in of:
            named |= {"inner": self.q_heads * self.head_dim, "outer": self.hidden}
        elif "inner" in of:
            named["inner"] = self.hidden
        return {name: size for name, size in named.items() if size}


def sizes_of(config: Any) -> ModelSizes:
    """The sizes of a Hugging Face configuration; of its text decoder where it has other parts."""
    text = config.get_text_config(decoder=True)
    return _sizes(lambda name: getattr(text, name, None))


def layer_kinds(text: Any) -> list[str]:
    """What each layer of a text decoder is, as its configuration names it; empty: all are alike."""
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []


def keeps_state(kind: str) -> bool:
    """Whether such a layer keeps a state, as Mamba's do."""
    return bool(_STATES.search(kind)) or kind == _BOTH


def has_cache(kind: str) -> bool:
    """Whether such a layer has attention with a KV cache."""
    return kind == _BOTH or ("attention" in kind and not _STATES.search(kind))


def stated_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes that a config.json states, without what transformers knows of the architecture."""
    return _sizes(text_part(config).get)


def known_sizes(model: str) -> ModelSizes:
    """The sizes of a model, of a preset as it states them, which needs no transformers. Raises as
    `model_config`."""
    known = presets().get(model)
    return model_sizes(model) if known is None else stated_sizes(known.config)


def model_sizes(model: str) -> ModelSizes:
    """The sizes of a model. Raises as `model_config`."""
    return sizes_of(model_config(model))


def _sizes(value: Callable[[str], Any]) -> ModelSizes:
    def first(*names: str) -> int:
        found = (value(name) for name in names)
        return next((int(size) for size in found if isinstance(size, int)), 0)

    heads, hidden, latent = (
        first("num_attention_heads"),
        first("hidden_size"),
        first("kv_lora_rank"),
    )
    experts = first("num_local_experts", "num_experts", "n_routed_experts")
    kinds = value("layer_types") or value("layers_block_type") or ()
    return ModelSizes(
        layers=first("num_hidden_layers"),
        hidden=hidden,
        inner=first("intermediate_size"),
        q_heads=heads,
        kv_heads=first("num_key_value_heads") or heads,
        head_dim=(first("head_dim") or hidden // heads) if heads else 0,
        latent=latent and latent + first("qk_rope_head_dim"),
        experts=experts,
        experts_per_token=first("num_experts_per_tok", "top_k_experts") if experts else 0,
        expert_inner=first("moe_intermediate_size", "intermediate_size") if experts else 0,
        has_state=not heads or any("attention" not in kind or "linear" in kind for kind in kinds),
    )
