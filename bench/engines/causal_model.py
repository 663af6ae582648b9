"""Models of transformers that predict the next token: built with random weights, or loaded.

Of a model with other parts (an image encoder), random weights are made for its text decoder alone
where transformers has that as a model of its own: decode runs nothing else.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from patcher.bench.engines.architecture import must_fit_cpu, quantization
from patcher.bench.engines.child_errors import is_memory_error
from patcher.bench.engines.model_config import first_line, model_config
from patcher.bench.engines.random_weights import spread_of
from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.workload import Workload, named_model, weights_id


def causal_class(config: Any, name: str) -> tuple[Any, Any]:
    """The class of transformers' `Auto...` that builds a model, and the configuration for it.

    Args:
        config: a Hugging Face configuration.
        name: the model's name, for the error.

    Raises:
        UsageError: transformers has no model of it that predicts tokens without an encoder.
    """
    import transformers as t

    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise UsageError(
            f"{name}, a {config.model_type}, is an encoder-decoder, which is not served here",
            "give a language model that decodes token by token",
        )
    causal: Any = t.AutoModelForCausalLM
    if type(text) in causal._model_mapping:
        return causal, text
    for auto in (causal, t.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto, config
    raise UsageError(
        f"transformers {importlib.metadata.version('transformers')} has no causal model of "
        f"{name}, a {config.model_type}",
        "give a language model that decodes token by token",
    )


def check_model(workload: Workload) -> None:
    """Refuse a model that transformers cannot build, with these weights, on this device.

    Raises:
        UsageError, MissingError: as `model_config`, `causal_class` and `must_fit_cpu`.
    """
    config = model_config(named_model(workload))
    causal_class(config, workload.model)
    if workload.weights == "random":
        _refuse_quantised(config, workload.model)
    if workload.device == "cpu":
        must_fit_cpu(workload.model)


def skeleton(config: Any, name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model without memory for weights, on the device `meta`.

    Raises:
        UsageError: transformers cannot build it.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return _built(config, name, dtype)


def random_model(workload: Workload) -> torch.nn.Module:
    """The workload's model with seeded random weights, see `randomise`.

    A head that shares the embedding's matrix would pick the last token again and again, so it gets
    one of its own, of the same size: a step reads as much.

    Raises:
        UsageError, MissingError: as `model_config` and `causal_class`.
    """
    config = model_config(workload.model)
    _refuse_quantised(config, workload.model)
    for each in (config, config.get_text_config(decoder=True)):
        each.tie_word_embeddings = False
    dtype: torch.dtype = getattr(torch, workload.dtype)
    devices = range(torch.cuda.device_count()) if workload.device == "cuda" else ()
    with torch.random.fork_rng(devices), torch.device(workload.device):
        torch.manual_seed(workload.seed)
        model = _built(config, workload.model, dtype)
    randomise(model, workload.seed)
    return model


def loaded_model(workload: Workload) -> torch.nn.Module:
    """The workload's model with the weights of its folder or of the hub.

    Raises:
        UsageError: they cannot be loaded, or are not those of its config.json.
        MissingError: as `model_config`.
    """
    name = weights_id(workload)
    auto, _ = causal_class(model_config(name), name)
    try:
        model, told = auto.from_pretrained(
            name,
            dtype=getattr(torch, workload.dtype),
            local_files_only=workload.weights == "local",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # each reader of files has errors of its own
        if is_memory_error(error):
            raise
        raise UsageError(
            f"cannot load weights of {name}: {first_line(error)}",
            "check the id or folder, or use --weights random",
        ) from error
    _must_be_whole(model, told, name)
    moved: torch.nn.Module = model.to(workload.device)
    return moved


def _must_be_whole(model: torch.nn.Module, told: Mapping[str, Any], name: str) -> None:
    """Refuse a model of which transformers made some parameters itself, without a seed.

    Args:
        model: the loaded model.
        told: what transformers told of the loading.
        name: the model's name, for the error.

    Raises:
        UsageError: the weights lack parameters, or have some of other sizes.
    """
    own = {parameter for parameter, _ in model.named_parameters()}
    other = {key for key, *_ in told["mismatched_keys"]}
    for keys, wrong in (
        (other, "have other sizes than its config.json says"),
        (own & (set(told["missing_keys"]) - other), "lack parameters of its config.json"),
    ):
        if keys:
            raise UsageError(
                f"the weights of {name} {wrong}: {len(keys):,}, such as {min(keys)}",
                "give the config.json that belongs to them, or use --weights random",
            )


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with seeded normal weights, as in `engines.random_weights`.

    What transformers itself does not centre on zero stays as transformers made it: norms, Mamba's
    decay, skip and step sizes. Norms are in float32 where `from_pretrained` loads them so.
    Near-zero dummy weights would send every token to the same experts, and decode would read a
    fraction of the model. Buffers (rotary tables) are computed from the configuration and stay.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    spread = spread_of(name for name, _ in model.named_parameters())
    wide = [
        each
        for kept in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for each in getattr(model, kept, None) or ()
    ]
    norms = {
        id(parameter)
        for path, module in model.named_modules()
        if "norm" in path.rpartition(".")[2] or type(module).__name__.endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if any(part in wide for part in name.split(".")):
            parameter.data = parameter.data.float()
        if id(parameter) in norms or not parameter.is_floating_point():
            continue
        if not _is_off_centre(parameter):
            parameter.normal_(0.0, spread[name], generator=generator)


def _refuse_quantised(config: Any, name: str) -> None:
    """Refuse a checkpoint's own format, which random weights here do not have.

    Raises:
        UsageError: the configuration names one.
    """
    quantised = quantization(config.to_dict())
    if quantised:
        method = quantised.get("quant_method", "unknown")
        raise UsageError(
            f"{name} is quantised ({method}), and random weights in transformers are not",
            "use --engine vllm, or leave quantization_config out of its config.json",
        )


def _built(config: Any, name: str, dtype: torch.dtype) -> torch.nn.Module:
    auto, chosen = causal_class(config, name)
    with refused(f"build {name}, a {config.model_type}"):
        model: torch.nn.Module = auto.from_config(chosen, dtype=dtype)
    return model


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn what transformers makes of a config.json that does not fit into one sentence.

    Args:
        what: what is done, and with which model.

    Raises:
        UsageError: it cannot be done. Memory that is too small is raised as it is.
    """
    try:
        yield
    except (PatcherError, MemoryError):
        raise
    except Exception as error:  # what a class makes of wrong values is of any kind
        if is_memory_error(error):
            raise
        why = f"it knows no {error}" if isinstance(error, KeyError) else first_line(error)
        raise UsageError(
            f"transformers {importlib.metadata.version('transformers')} cannot {what}: {why}",
            "check its config.json",
        ) from error


def _is_off_centre(parameter: torch.Tensor) -> bool:
    """Whether values mean something: constants but zero, or all on one side of it."""
    if parameter.dim() > 2:
        return False
    values = parameter.float()
    return bool(values.mean().abs() > values.std(correction=0))
