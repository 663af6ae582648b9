"""Check that a model's parts are transformers' own, for which patches are made."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from patcher.bench import VerificationError

UNTRIED = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What a module may raise that is called in another way than its model calls it."""


def sentence_of(error: Exception) -> str:
    """The first sentence of an error, or its class where it says nothing."""
    lines = str(error).splitlines() or [""]
    return lines[0].partition(". ")[0].removesuffix(".") or type(error).__name__


def body_of(model: Any) -> Any:
    """The part of a model that holds `layers` and `norm`.

    Raises:
        VerificationError: the model is not a gpt-oss of transformers.
    """
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    body: Any = getattr(model, "model", model)
    layers: list[Any] = list(getattr(body, "layers", ()))
    own = source.GptOssDecoderLayer
    others = {kind_of(layer) for layer in layers} - {own}
    if made := [kind.__name__ for kind in others if issubclass(kind, own)]:
        raise VerificationError(
            f"other code has made {made[0]} of the model's {own.__name__}",
            "patch the model before it is sharded or wrapped",
        )
    if not layers or others:
        raise VerificationError(
            f"{type(model).__name__} has no gpt-oss decoder layers",
            "use transformers' GptOssForCausalLM",
        )
    return body


def kind_of(module: Any) -> type[Any]:
    """The class of a module, without the subclasses that patches put in its place."""
    return without_patches(type(module))


def without_patches(kind: type[Any]) -> type[Any]:
    """The class that patches replaced; the class itself if it is no patch's."""
    while "patch_point" in vars(kind):
        kind = kind.__base__  # type: ignore[assignment]  # a patch's class has one
    return kind


def bare(module: Any) -> Any:
    """A module to try: a copy of it and of its parts without patches and hooks, whose calls nobody
    counts or sees. Weights and settings are the same objects. It is in evaluation: dropout would
    give each try another result, and take random numbers that the model's own user drew before."""
    copied = copy.copy(module)
    copied.training = False
    copied._modules = {
        name: None if part is None else bare(part) for name, part in module._modules.items()
    }
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    return copied


def some_numbers(*shape: int) -> torch.Tensor:
    """What to try a part on: the same normal numbers each time, whatever dtype and device tensors
    are made in by default. Nobody else's random numbers are taken."""
    always = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=always, device="cpu", dtype=torch.float32)


def refuse_replaced(module: Any) -> None:
    """Check that no other code has put a forward in the place of the module's own.

    Raises:
        VerificationError: it has, such as accelerate, which spreads and offloads a model that way.
    """
    if "forward" not in module.__dict__:
        return
    what = f"{kind_of(module).__name__}.forward was replaced"
    if hasattr(module, "_hf_hook"):
        raise VerificationError(
            f"{what} by a hook of accelerate, which may move what the patch computes with",
            "load the model on one device, without device_map or offload",
        )
    raise VerificationError(what, "patch the model before other code does")


def check_kinds(modules: Iterable[torch.nn.Module], kind: type[torch.nn.Module]) -> None:
    """Check that modules are of the transformers class that a patch replaces.

    The fingerprint covers the file's text, so it does not show a later assignment.

    Raises:
        VerificationError: a module has another class, or the class's forward was replaced.
    """
    if any(kind_of(module) is not kind for module in modules):
        raise VerificationError(
            f"a part of the model is not transformers' {kind.__name__}",
            "build the model without replacing its parts",
        )
    if not written_by_transformers(kind.forward):
        raise VerificationError(
            f"{kind.__name__}.forward was replaced", "remove the other patch first"
        )


def written_by_transformers(function: Any, *, within: Any = None) -> bool:
    """Whether a function and all functions that it wraps come from transformers' files.

    Args:
        function: the function.
        within: one of those that it wraps, which may be anyone's.
    """
    import transformers

    home = Path(inspect.getfile(transformers)).parent
    while function is not None and function is not within:
        code = getattr(function, "__code__", None)
        if code is None or not Path(code.co_filename).is_relative_to(home):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
