"""What transformers makes of a preset: its configuration, and the class of its causal model."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patcher.bench.errors import MissingError, UsageError
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


def config_file(model: str) -> Path | None:
    """The config.json of a model that is a folder or such a file; None if it is neither."""
    path = Path(model)
    if path.is_file() and path.suffix == ".json":
        return path
    return path / "config.json" if (path / "config.json").is_file() else None


def read_config(file: Path) -> dict[str, Any]:
    """A config.json as it is written.

    Raises:
        UsageError: it is no JSON object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is not JSON: {error}", "give a model's config.json") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds no object", "give a model's config.json")
    return found


def model_config(model: str) -> Any:
    """The Hugging Face configuration of a model.

    Args:
        model: a preset, a folder with a config.json, such a file, or a Hugging Face id.

    Raises:
        UsageError: it is none of these, its config.json is not JSON, transformers does not know its
            architecture, or its code comes with its weights.
    """
    from transformers import AutoConfig

    if known := presets().get(model):
        return configuration(known)
    file = config_file(model)
    if file is not None and read_config(file).get("auto_map"):
        raise UsageError(
            f"the code of {model} comes with its weights (auto_map in config.json), and patcher "
            "runs no such code",
            "use a model whose architecture is part of transformers",
        )
    if file is None and (model.startswith(("/", ".", "~")) or model.count("/") > 1):
        raise UsageError(
            f"there is no config.json at {model}: it is no preset, and no folder of a model",
            f"presets are: {', '.join(presets())}",
        )
    version = importlib.metadata.version("transformers")
    try:
        return AutoConfig.from_pretrained(str(file or model))
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = next((line for line in str(error).splitlines() if line), type(error).__name__)
        if file is not None:
            raise UsageError(
                f"transformers {version} cannot read {file}: {why[:200]}",
                "install a transformers that knows this `model_type`, or mend the file",
            ) from error
        raise UsageError(
            f"unknown model {model!r}: it is no preset and no folder with a config.json, and "
            f"Hugging Face gives none of that name: {why[:200]}",
            f"presets are: {', '.join(presets())}",
        ) from error


def text_config(model: str) -> Any:
    """The configuration of the language model alone, for transformers, without quantisation.

    Raises:
        UsageError: as `model_config`, or it has no causal language model in transformers, or a
            folder's weights are quantised, which random ones in transformers are not.
    """
    from transformers import AutoModelForCausalLM

    config = model_config(model).get_text_config()
    quantised = getattr(config, "quantization_config", None)
    if quantised and model not in presets():
        method = quantised.get("quant_method", "unknown")
        raise UsageError(
            f"{model} is quantised ({method}), and random weights in transformers are not",
            "use --engine vllm, or leave quantization_config out of its config.json",
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UsageError(
            f"transformers has no causal language model for {config.model_type!r}",
            "give a model that generates text, or use --engine vllm",
        )
    return config


CPU_PARAMETERS = 1_000_000_000
"""Parameters beyond which a model takes a CPU minutes."""


def must_fit_cpu(model: str) -> None:
    """Refuse a model that is too large for a CPU.

    Raises:
        MissingError: it is.
        UsageError: as `text_config`.
    """
    if known := presets().get(model):
        size, fits = known.parameters_b, known.fits_cpu
    elif config_file(model) is None:
        return  # the hub's models tell their size once they are loaded
    else:
        import torch
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        with torch.device("meta"):
            shell = auto.from_config(text_config(model))
        count = sum(each.numel() for each in shell.parameters())
        size, fits = count / 1e9, count <= CPU_PARAMETERS
    if not fits:
        raise MissingError(
            f"no GPU here, and {model} ({size:.3g} billion parameters) does not fit a CPU",
            "run on a GPU host, read a profile with --from FILE, or try `patcher demo`",
        )


def published_config(model: str) -> dict[str, Any]:
    """What config.json says of a model: its class, its sizes and its quantisation.

    Args:
        model: as `model_config`.

    Raises:
        UsageError: as `model_config`.
    """
    if known := presets().get(model):
        return {"architectures": [causal_model(known)], **known.config, **known.published}
    if file := config_file(model):
        return read_config(file)
    found: dict[str, Any] = model_config(model).to_dict()
    return found


def full_config(model: str) -> dict[str, Any]:
    """A whole config.json of a model, as an engine reads it from a folder.

    Args:
        model: as `model_config`.

    Raises:
        UsageError: as `model_config`.
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
    """The sizes of a preset, or of a config.json that is on this machine; None if it is neither, or
    has no attention.

    Raises:
        UsageError: as `model_config`.
    """
    if model not in presets() and config_file(model) is None:
        return None
    text = model_config(model).get_text_config()
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    if not heads:
        return None
    return ModelSizes(
        layers=int(text.num_hidden_layers),
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )
