"""What transformers makes of a preset: its configuration, and the class of its causal model."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from patcher.bench.errors import UsageError
from patcher.bench.presets import Preset


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
