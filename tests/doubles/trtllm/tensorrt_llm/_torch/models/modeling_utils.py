"""Double: the registry of model classes, as it was (one dict) and as it is (imported by name)."""

import importlib
from collections.abc import Callable

from torch import nn

MODEL_CLASS_MAPPING: dict[str, type[nn.Module]] = {}
_BUILT_IN = "tensorrt_llm._torch.models."
_INDEX = {"GptOssForCausalLM": _BUILT_IN + "modeling_gpt_oss"}
_EXTERNAL_ARCH_TO_MODULE: dict[str, str] = {}
_REGISTRATIONS: list[tuple[str, str, type[nn.Module]]] = []
"""Module, architecture and class, in the order of registration."""


def register_auto_model(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A class from outside replaces a built-in one; a built-in one fills an empty place only."""

    def decorator(cls: type[nn.Module]) -> type[nn.Module]:
        _REGISTRATIONS.append((cls.__module__, name, cls))
        if name not in MODEL_CLASS_MAPPING or not cls.__module__.startswith(_BUILT_IN):
            MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


def export_external_model_modules() -> dict[str, str]:
    """Architecture to module, of what a new process would not find."""
    return {
        name: cls.__module__
        for name, cls in MODEL_CLASS_MAPPING.items()
        if not cls.__module__.startswith(_BUILT_IN)
    }


def register_external_model_modules(arch_to_module: dict[str, str]) -> None:
    """Says where classes are and imports none. What was declared before gives up its place; a
    module that is named again would not run its decorators twice, so its classes are put back.
    """
    if arch_to_module == _EXTERNAL_ARCH_TO_MODULE:
        return
    _EXTERNAL_ARCH_TO_MODULE.clear()
    _EXTERNAL_ARCH_TO_MODULE.update(arch_to_module)
    MODEL_CLASS_MAPPING.clear()
    for module, name, cls in _REGISTRATIONS:
        own = module if module.startswith(_BUILT_IN) else None
        if arch_to_module.get(name, own) == module:
            MODEL_CLASS_MAPPING[name] = cls


def get_registered_model_class(model_arch: str) -> type[nn.Module] | None:
    if model_arch not in MODEL_CLASS_MAPPING:
        module = _EXTERNAL_ARCH_TO_MODULE.get(model_arch) or _INDEX.get(model_arch)
        if module is not None:
            importlib.import_module(module)
    return MODEL_CLASS_MAPPING.get(model_arch)
