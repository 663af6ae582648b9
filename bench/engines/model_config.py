"""The config.json of a model that somebody names: a preset, a folder, a file, a Hugging Face id."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.presets import Preset, presets, problems

CONFIG = "config.json"
HUB_TIMEOUT_S = 5.0
"""Seconds within which the hub answers, or counts as out of reach."""


def configuration(preset: Preset) -> Any:
    """The Hugging Face configuration of a preset.

    Raises:
        UsageError: transformers does not know the architecture, or not these arguments.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(preset.architecture, **preset.config)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{_transformers()} cannot configure the preset {preset.name}, of the "
            f"architecture {preset.architecture!r}: {first_line(error)}",
            "`architecture` is a `model_type` of transformers, `config` is what that takes",
        ) from error


def model_config(model: str) -> Any:
    """The Hugging Face configuration of a model.

    Args:
        model: a preset, a folder with a config.json, such a file, or a Hugging Face id.

    Raises:
        UsageError: there is no such model, its config.json is not valid, it needs code of its own,
            or transformers does not know its architecture.
        MissingError: it is neither in the cache nor to be had from the hub.
    """
    if known := presets().get(model):
        return configuration(known)
    return read_config(model, config_file(model))


def read_config(model: str, file: Path) -> Any:
    """The Hugging Face configuration in a file; `model` names it. Raises as `model_config`."""
    from transformers import AutoConfig

    said = read_json(file)
    kind = said.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(
            f"the {CONFIG} of {model} says no model_type, so its architecture is not known",
            "give the config.json of a language model",
        )
    try:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:  # what a class makes of wrong values is of any kind
        raise _not_configured(model, kind, "auto_map" in said, error) from error


def config_file(model: str) -> Path:
    """Where the config.json of a model lies; one of the hub is downloaded, and nothing else of it.

    Raises:
        UsageError: there is no such folder, file or id.
        MissingError: the hub cannot be reached, or asks for an account.
    """
    path = Path(os.path.expanduser(model))
    refuse_gguf(model, path)
    if path.is_dir():
        path = path / CONFIG
        if not path.is_file():
            raise UsageError(
                f"the folder {model} has no {CONFIG}, so it holds no model",
                "give a folder that `save_pretrained` wrote, or a Hugging Face id",
            )
    if path.is_file():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.endswith(".json"):
        raise UsageError(
            f"there is no folder or file {model}", "give a model's folder or its config.json"
        )
    if model.count("/") != 1:
        wrong = "".join(f"; {problem}" for problem in problems().values())
        raise UsageError(
            f"unknown model {model!r}",
            f"presets are: {', '.join(presets())}; or give a Hugging Face id (OWNER/NAME), a "
            f"folder or a {CONFIG}{wrong}",
        )
    return _from_hub(model)


def refuse_gguf(model: str, path: Path) -> None:
    """Refuse a GGUF file, and a folder with nothing else: no engine here loads it as it is.

    Raises:
        UsageError: it is one.
    """
    alone = path.is_dir() and not (path / CONFIG).is_file() and any(path.glob("*.gguf"))
    if alone or (path.is_file() and path.suffix == ".gguf"):
        raise UsageError(
            f"{model} holds its model as GGUF, which engines here do not load",
            "write it as a folder first: docs/tutorials/my-own-model.md has the script",
        )


def read_json(file: Path) -> dict[str, Any]:
    """What a config.json says.

    Raises:
        UsageError: it cannot be read, or is no JSON object.
    """
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} is not JSON: {first_line(error)}", f"give a model's {CONFIG}"
        ) from error
    if not isinstance(said, dict):
        raise UsageError(f"{file} holds no object", f"give a model's {CONFIG}")
    return said


def _from_hub(model: str) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        try:
            return Path(hub.hf_hub_download(model, CONFIG, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            _reach_hub(model)
            return Path(hub.hf_hub_download(model, CONFIG))
    except errors.HFValidationError as error:
        raise UsageError(
            f"{model!r} is no folder, and no Hugging Face id: {first_line(error)}",
            "an id is OWNER/NAME",
        ) from error
    except errors.GatedRepoError as error:
        raise MissingError(
            f"{model} is gated: its owner has to let you read it",
            "accept its licence on huggingface.co and set HF_TOKEN; or give its config.json",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"Hugging Face has no model {model}, or it is private",
            "check the id; for a private one set HF_TOKEN",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(model) from error
    except errors.EntryNotFoundError as error:
        raise UsageError(
            f"{model} has no {CONFIG}, so it is no model of transformers", "check the id"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise MissingError(
            f"Hugging Face did not send the {CONFIG} of {model}: {first_line(error)}",
            f"try again, or give a folder or a {CONFIG}",
        ) from error


def _reach_hub(model: str) -> None:
    """Ask for the config.json once: a download would try five times, and tell of each.

    Raises:
        MissingError: no answer came; what the hub answers is raised as huggingface_hub has it.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(model, CONFIG), timeout=HUB_TIMEOUT_S)
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise
    except Exception as error:  # of whichever HTTP library this version of the hub's client has
        raise _unreachable(model) from error


def _unreachable(model: str) -> MissingError:
    return MissingError(
        f"{model} is not in the cache of Hugging Face, and the hub cannot be reached",
        f"give a folder or a {CONFIG}, or run this where there is a network",
    )


def _not_configured(model: str, kind: str, own_code: bool, error: Exception) -> PatcherError:
    from transformers import CONFIG_MAPPING

    if kind in CONFIG_MAPPING:
        return UsageError(
            f"{_transformers()} cannot configure {model}, a {kind}: {first_line(error)}",
            f"check its {CONFIG}",
        )
    if own_code:
        return UsageError(
            f"{model} needs code of its own (trust_remote_code), which patcher does not run: "
            f"{_transformers()} has no architecture {kind!r}",
            "use an engine that has the architecture itself, such as vllm",
        )
    return UsageError(
        f"{_transformers()} has no architecture {kind!r}, which {model} is of",
        "install a version of transformers that has it, or check `model_type`",
    )


def _transformers() -> str:
    return f"transformers {importlib.metadata.version('transformers')}"


def first_line(error: Exception) -> str:
    """The first line of an error that says something; at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.endswith(":")] or lines
    return told[0][:300] if told else type(error).__name__
