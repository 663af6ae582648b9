"""What transformers makes of a preset: its configuration, and the class of its causal model."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.bench.errors import UsageError
from patcher.bench.presets import Preset, presets


def configuration(preset: Preset) -> Any:
    """The Hugging Face configuration of a preset.

    Raises:
        UsageError: transformers does not know the architecture, or not these arguments.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(preset.architecture, **preset.config)
    except (ValueError, TypeError) as error:
        version = importlib.metadata.version("transformers")
        raise UsageError(
            f"transformers {version} cannot configure the preset {preset.name}, of the "
            f"architecture {preset.architecture!r}: {str(error).splitlines()[0]}",
            "`architecture` is a `model_type` of transformers, `config` is what that takes",
        ) from error


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
        model: a preset, or a folder with a config.json.

    Raises:
        UsageError: it is neither, or the file is not JSON.
    """
    if known := presets().get(model):
        return {"architectures": [causal_model(known)], **known.config, **known.published}
    try:
        found: dict[str, Any] = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model!r} is no preset, and no folder with a config.json that can be read: {error}",
            f"presets are: {', '.join(presets())}",
        ) from error
    return found


def full_config(model: str) -> dict[str, Any]:
    """A whole config.json of a model, as an engine reads it from a folder.

    Args:
        model: a preset, or a folder with a config.json.

    Raises:
        UsageError: as `published_config`, or transformers does not know the preset's architecture.
    """
    known = presets().get(model)
    if known is None:
        return published_config(model)
    config: dict[str, Any] = configuration(known).to_dict()
    return {**config, "architectures": [causal_model(known)], **known.published}


@dataclass(frozen=True)
class ModelSizes:
    """What a KV cache's size depends on."""

    layers: int
    """Decoder layers."""
    kv_heads: int
    """Heads of keys and values in a layer."""
    head_dim: int
    """Elements of a head."""


def model_sizes(model: str) -> ModelSizes | None:
    """The sizes of a preset, or of a folder with a config.json; None if it is neither.

    Raises:
        UsageError: transformers does not know the preset's architecture.
    """
    if known := presets().get(model):
        text = configuration(known)
    elif Path(model, "config.json").is_file():
        from transformers import AutoConfig

        text = AutoConfig.from_pretrained(model).get_text_config()
    else:
        return None
    heads = int(text.num_attention_heads)
    return ModelSizes(
        layers=int(text.num_hidden_layers),
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )
