"""What transformers makes of a preset: its configuration, and the class of its causal model."""

from __future__ import annotations

import importlib.metadata
import json
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
