"""Are a model's parts transformers' own? What a patch replaces must be what it was made for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from patcher.bench import VerificationError


def body_of(model: Any) -> Any:
    """The part of a model that holds `layers` and `norm`.

    Raises:
        VerificationError: not a gpt-oss of transformers.
    """
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    body: Any = getattr(model, "model", model)
    layers: list[Any] = list(getattr(body, "layers", ()))
    if not layers or any(type(layer) is not source.GptOssDecoderLayer for layer in layers):
        raise VerificationError(
            f"{type(model).__name__} has no gpt-oss decoder layers",
            "this patch is for transformers' GptOssForCausalLM",
        )
    return body


def check_kinds(modules: Iterable[torch.nn.Module], kind: type[torch.nn.Module]) -> None:
    """Hold instances against the class of transformers that a patch replaces.

    Raises:
        VerificationError: another class, or its forward was replaced: the fingerprint is of the
            file's text, and knows nothing of a later assignment.
    """
    if any(type(module) is not kind for module in modules):
        raise VerificationError(
            f"a part of the model is not transformers' {kind.__name__}",
            "build the model without replacing its parts",
        )
    if not written_by_transformers(kind.forward):
        raise VerificationError(
            f"{kind.__name__}.forward was replaced", "remove the other patch first"
        )


def written_by_transformers(function: Any) -> bool:
    """Whether a function and all that it wraps come from the files of transformers."""
    import transformers

    home = Path(inspect.getfile(transformers)).parent
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not Path(code.co_filename).is_relative_to(home):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
