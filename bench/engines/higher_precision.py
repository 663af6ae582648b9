"""Run a model of transformers in a wider dtype than its weights, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Disjoint modules that hold all parameters but those of the input embedding: each decoder
    layer, and what lies beside them.
    """
    lists: list[torch.nn.Module] = [
        each for each in model.modules() if isinstance(each, torch.nn.ModuleList)
    ]
    layers = list(max(lists, key=_parameters, default=torch.nn.ModuleList()).children())
    inside = {id(part) for layer in layers for part in layer.modules()}
    inside.add(id(model.get_input_embeddings()))  # type: ignore[operator]
    beside = [
        module
        for module in model.modules()
        if id(module) not in inside and list(module.parameters(recurse=False))
    ]
    return [*layers, *beside]


@contextmanager
def upcast_in_turn(modules: list[torch.nn.Module], wide: torch.dtype) -> Iterator[None]:
    """Hold each module in `wide` only while it runs, which takes more memory for one block only.
    Afterwards it is as before, even if its forward raises.
    """
    handles = []
    before: dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]] = {}

    def widen(module: Any, _args: Any) -> None:
        values = {name: parameter.data for name, parameter in module.named_parameters()}
        before[id(module)] = values, {name: each.dtype for name, each in module.named_buffers()}
        module.to(wide)

    def narrow(module: Any, *_: Any) -> None:
        values, dtypes = before.pop(id(module))
        for name, parameter in module.named_parameters():
            parameter.data = values[name]
        with torch._C.DisableTorchFunction():  # `nothing_narrows` is in force
            for name, buffer in module.named_buffers():  # a forward may have written to it
                buffer.data = buffer.data.to(dtypes.get(name, buffer.dtype))

    for module in modules:
        handles += [
            module.register_forward_pre_hook(widen),
            module.register_forward_hook(narrow, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            if id(module) in before:  # another hook raised before its forward
                narrow(module)


@contextmanager
def nothing_narrows(model: Any, wide: torch.dtype) -> Iterator[None]:
    """Keep in `wide` what code of the model casts to a fixed dtype: norms, softmax, states.

    The grouped matmul of experts takes no wide dtypes, so that experts run one after another.
    """
    config = model.config.get_text_config(decoder=True)
    experts = config._experts_implementation
    config._experts_implementation = "eager"
    try:
        with _NothingNarrows(wide):
            yield
    finally:
        config._experts_implementation = experts


class _NothingNarrows(TorchFunctionMode):
    """Turns casts of wide tensors to narrower floats into casts to the wide dtype."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._wide = wide

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        more = dict(kwargs or {})
        first = args[0] if args else more.get("input")
        if isinstance(first, torch.Tensor) and first.dtype == self._wide:
            if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
                return first
            args = tuple(self._widened(each) for each in args)
            more = {name: self._widened(each) for name, each in more.items()}
        return func(*args, **more)

    def _widened(self, value: Any) -> Any:
        narrower = isinstance(value, torch.dtype) and value.is_floating_point
        return self._wide if narrower and value.itemsize < self._wide.itemsize else value


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
