"""Which patch points a model of transformers has layers for, by its config.json.

Files of transformers are read, not imported: an import takes seconds. Only a class of norms whose
source was not read before is built, to see what it computes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from patcher.bench import VerificationError
from patcher.bench.engines.architecture import quantization, stated_sizes, text_part
from patcher.integrate.layers import StepCalls
from patcher.integrate.source_parts import chosen_classes
from patcher.integrate.transformers.mlp_classes import mlp_classes, stated_activation
from patcher.integrate.transformers.model_files import TransformersTree, folder_of, modeling_file
from patcher.integrate.transformers.norm_sources import norm_classes
from patcher.integrate.transformers.role_sources import says

if TYPE_CHECKING:
    from patcher.integrate.guards import CallGuards

LAYERS: Mapping[str, str | None] = {
    "gpt_oss.decoder_layer": "gpt_oss",
    "gpt_oss.experts": "gpt_oss",
    "gpt_oss.rotary_embedding": "gpt_oss",
    "gpt_oss.router": "gpt_oss",
    "norm": None,
    "gemma_norm": None,
    "add_norm": None,
    "gated_mlp": None,
    "linear": None,
    "router": None,
    "rotation": None,
    "experts.sum": None,
    "experts": None,
}
"""The architecture that a patch point is of, by its name; None for a role that any may have."""
NORMS: Mapping[str, tuple[str, str]] = {
    "norm": ("rms_norm", "its weight alone"),
    "gemma_norm": ("gemma_rms_norm", "one more than its weight"),
}
"""By point: the op that its norms compute, and what they multiply by."""


ROLES: Mapping[str, str] = {
    "add_norm": "no layer of {} in transformers takes an RMSNorm of a sum with its residual",
    "linear": "no layer of {} in transformers is torch.nn.Linear's",
    "router": "no router of {} in transformers has the softmax over the chosen logits as scores",
    "rotation": "no attention of {} in transformers turns the halves of a head",
    "experts.sum": "no experts of {} in transformers are run by grouped_mm or batched_mm",
    "experts": "no experts of {} in transformers compute silu(gate) * up without biases",
}
"""What is said of a model without layers of a point, by those that a built model is asked for."""
EXPERTS_ALONE = ("mxfp4",)
"""Formats of weights for which transformers puts in other experts, and leaves linear layers."""


def of_model(point: str, config: Callable[[], Mapping[str, Any]]) -> str:
    """The layers that a patch point has in a model.

    Args:
        point: the point's name.
        config: reads the model's config.json.

    Raises:
        VerificationError: it has none; the message says why.
        MissingError: transformers is not installed.
    """
    model, alone = config(), LAYERS[point]
    if point in NORMS:
        return _norms_of(point, model)
    if point in ROLES:
        return _role_of(point, model)
    if alone is None:
        return mlps_of(model)
    kind, named = str(model.get("model_type")), model.get("architectures")
    names = ", ".join(map(str, named)) if named and isinstance(named, list | tuple) else kind
    if kind != alone:
        raise VerificationError(
            f"{names} has no layer of {point}, which is of {alone.replace('_', '-')} alone",
            "take an engine whose patch points fit any model: --engine vllm",
        )
    return f"{names} has layers of {point}"


def _norms_of(point: str, config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    if found := _norms_in(point, config):
        return f"{kind} has {', '.join(found)}"
    raise VerificationError(
        f"no norm of {kind} in transformers multiplies by {NORMS[point][1]}",
        "its norms are of another kind; name another op",
    )


def _role_of(point: str, config: Mapping[str, Any]) -> str:
    kind, said = str(config.get("model_type")), [False, *_said(point, config)]
    if True in said:
        return f"{kind} has layers of {point}{_but_quantised(point, config)}"
    if None in said:  # settings decide
        from patcher.integrate.transformers.role_places import taken

        _, found = taken(point, config)
        if names := dict.fromkeys(type(each).__name__ for each in found):
            return f"{kind} has {', '.join(names)}{_but_quantised(point, config)}"
    raise VerificationError(
        ROLES[point].format(kind), "its layers are of another kind; name another op"
    )


def _but_quantised(point: str, config: Mapping[str, Any]) -> str:
    """What is said beside a model whose loader puts other modules in the place of layers:
    which ones is known of the loaded model alone."""
    method = quantization(config).get("quant_method", "unknown") if quantization(config) else None
    of_experts = point.startswith("experts")
    if method is None or not (of_experts or (point == "linear" and method not in EXPERTS_ALONE)):
        return ""
    return f", without those that are loaded quantised ({method})"


def _said(point: str, config: Mapping[str, Any]) -> Iterator[bool | None]:
    """What each file of a model says of a point by itself; None: only a built model tells."""
    for each in _names(config):
        file = modeling_file(each)
        if file is not None and point == "linear":
            yield "nn.Linear(" in file.read_text(encoding="utf-8") or None
        elif file is not None:
            yield says(point, file)


def _norms_in(point: str, config: Mapping[str, Any]) -> list[str]:
    """The classes of norms in a model that a point takes."""
    for file in filter(None, map(modeling_file, _names(config))):
        found = list(dict.fromkeys(norm_classes(file, NORMS[point][0])))
        chosen = set(found) <= chosen_classes(file)
        # settings say whether the model has it, which only a model without weights tells
        if found and (not chosen or _builds(config, found)):
            return found
    return []


def mlps_of(config: Mapping[str, Any]) -> str:
    """The MLPs whose activation is silu(gate) * up in a model.

    Raises:
        VerificationError, MissingError: as `of_model`.
        UsageError: see `text_part`; or transformers cannot build the model.
    """
    kind = str(config.get("model_type"))
    if found := _mlps_in(config):
        return f"{kind} has {', '.join(found)}"
    raise VerificationError(
        f"no MLP of {kind} in transformers has silu(gate) * up as its activation",
        "its layers are of another kind; name another op",
    )


def _mlps_in(config: Mapping[str, Any]) -> list[str]:
    """The classes of MLPs in a model that `gated_mlp` takes."""
    text = text_part(config)
    for each in _names(config):
        file, settings = modeling_file(each), folder_of(each)
        silu = [
            name
            for name, setting in ({} if file is None else mlp_classes(file)).items()
            if settings is not None
            and text.get(setting, stated_activation(settings, setting)) in ("silu", "swish")
        ]
        # a mixture of experts may have none in any layer, which only a model without weights tells
        if silu and (not stated_sizes(config).experts or _builds(config, silu)):
            return silu
    return []


def calls_in_step(
    point: str, config: Mapping[str, Any], guards: CallGuards | None = None
) -> StepCalls | None:
    """How often a step of decode comes by a patch point, by a model without weights.

    Args:
        point: the point's name.
        config: the model's config.json; `of_model` has found that it has layers of the point.
        guards: those of a patch, which may refuse what a layer holds by its size.

    Returns:
        The number of calls; None where the model's code does not run without weights, or if its
        loader puts other modules in the place of some layers.

    Raises:
        UsageError: transformers cannot build the model.
    """
    import torch

    from patcher.integrate.transformers.parts import UNTRIED
    from patcher.integrate.transformers.points import POINTS

    kind: Any = POINTS[point]
    if LAYERS[point] is not None:
        return StepCalls(stated_sizes(config).layers * int(kind.calls_per_layer))
    if _but_quantised(point, config):
        return None
    if point in ROLES:
        from patcher.integrate.transformers.role_places import taken

        model, found = taken(point, config)
        if not found:  # a built model alone tells
            return None
    else:
        names = _norms_in(point, config) if point in NORMS else _mlps_in(config)
        model = without_weights(config, torch.bfloat16).eval()  # experts' kernels take no float32
        # one without a weight may be of the same class
        holds = kind(model).of_role
        found = [each for each in model.modules() if type(each).__name__ in names and holds(each)]
    constants, calls = kind(model).constants, StepCalls()

    def count(module: Any, *_: Any) -> None:
        nonlocal calls
        refusal = None if guards is None else guards.refusal_of_sizes(constants(module))
        calls += StepCalls(1) if refusal is None else StepCalls(refused=Counter([refusal]))

    hooks = [module.register_forward_pre_hook(count) for module in found]
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device="meta"), use_cache=True)
    except (RuntimeError, *UNTRIED):  # it asks for the value of a tensor, or for another cache
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _names(config: Mapping[str, Any]) -> list[str]:
    """The architectures of a model: of its text decoder, and of all of it.

    Raises:
        VerificationError: transformers has none of them.
        UsageError: see `text_part`.
    """
    kind = str(config.get("model_type"))
    names = list(dict.fromkeys([str(text_part(config).get("model_type", kind)), kind]))
    if all(folder_of(each) is None for each in names):
        raise VerificationError(
            f"transformers {TransformersTree.installed().version()} has no architecture {kind!r}",
            "take an engine that has it, or check `model_type` in its config.json",
        )
    return names


def _builds(config: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether a model has modules of these classes.

    Raises:
        UsageError: transformers cannot build it.
    """
    model = without_weights(config)
    return any(type(module).__name__ in names for module in model.modules())


def without_weights(config: Mapping[str, Any], dtype: Any = None) -> Any:
    """The model of a config.json on the device `meta`, in float32 if there is no dtype; raises as
    `model_config`, `skeleton`."""
    from patcher.bench.engines.causal_model import skeleton
    from patcher.bench.engines.model_config import CONFIG, read_config

    with TemporaryDirectory() as folder:  # a file may have what no configuration takes
        file = Path(folder) / CONFIG
        file.write_text(json.dumps(config), encoding="utf-8")
        found = read_config("this model", file), "this model"
        return skeleton(*found) if dtype is None else skeleton(*found, dtype)


def default_activation(architecture: str) -> str | None:
    """The activation that an architecture's configuration has if a config.json names none.

    Raises:
        MissingError: transformers is not installed.
    """
    folder = folder_of(architecture)
    if folder is None:
        return None
    found = (stated_activation(folder, name) for name in ("hidden_activation", "hidden_act"))
    return next(filter(None, found), None)
