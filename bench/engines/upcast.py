"""Run a model of transformers in higher precision, a block at a time, from the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map


def blocks(model: Any) -> list[Any]:
    """Parts of a model that run one after another and hold all its parameters: the elements of its
    lists of layers, and whatever has parameters outside of these.
    """
    found: list[Any] = []

    def visit(module: Any) -> None:
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList):
                found.extend(child)
            elif any(isinstance(each, torch.nn.ModuleList) for each in child.modules()):
                visit(child)
            elif next(child.parameters(), None) is not None:
                found.append(child)

    visit(model)
    inside = {id(parameter) for block in found for parameter in block.parameters()}
    # where a module with lists of layers holds parameters itself, all are upcast at once
    return found if inside >= {id(each) for each in model.parameters()} else [model]


@contextmanager
def upcast_in_turn(modules: list[Any], wide: torch.dtype) -> Iterator[None]:
    """Hold each module in `wide` only while it runs, which doubles the memory of one block only.
    What a block returns stays wide.
    """
    handles = []
    held: dict[int, list[torch.dtype]] = {}

    def widen(module: Any, args: Any, named: Any) -> Any:
        held[id(module)] = [each.dtype for each in module.parameters()]
        module.to(wide)
        return tree_map(_widened, args), tree_map(_widened, named)

    def _widened(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(wide) if is_float else value

    def narrow(module: Any, *_: Any) -> None:
        for parameter, dtype in zip(module.parameters(), held.pop(id(module)), strict=True):
            parameter.data = parameter.data.to(dtype)

    for module in modules:
        handles += [
            module.register_forward_pre_hook(widen, with_kwargs=True),
            module.register_forward_hook(narrow, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            if id(module) in held:
                narrow(module)


@contextmanager
def wide_parts(model: Any, wide: torch.dtype) -> Iterator[None]:
    """Keep norms and the grouped expert matmul in `wide`; both cast to a narrower dtype."""
    replaced = {
        norm: formula
        for norm in model.modules()
        if type(norm).__name__.endswith("RMSNorm") and (formula := _formula(norm, wide))
    }
    experts = getattr(model.config, "_experts_implementation", None)
    # an instance's own forward (a wrapper that somebody installed) is restored afterwards
    own = [norm.__dict__.get("forward") for norm in replaced]
    for norm, formula in replaced.items():
        norm.forward = formula
    if experts is not None:
        model.config._experts_implementation = "eager"
    try:
        yield
    finally:
        if experts is not None:
            model.config._experts_implementation = experts
        for norm, forward in zip(replaced, own, strict=True):
            if forward is None:
                del norm.forward
            else:
                norm.forward = forward


def _formula(norm: Any, wide: torch.dtype) -> Any:
    """An RMSNorm's forward in `wide`; None if it is not known."""
    offset, epsilon = offset_of(norm), _epsilon(norm)
    if offset is None or epsilon is None:
        return None

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(wide)
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
        return cast(torch.Tensor, (norm.weight.to(wide) + offset) * hidden * scale)

    return forward


def offset_of(norm: Any) -> float | None:
    """What an RMSNorm adds to its weight, 0 or 1, tried on numbers; None if it is something else.
    The weight is the same afterwards.
    """
    weight, epsilon = getattr(norm, "weight", None), _epsilon(norm)
    if weight is None or epsilon is None or len(signature(norm.forward).parameters) != 1:
        return None
    row = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device, dtype=weight.dtype)
    normed = row.float() * torch.rsqrt(row.float().pow(2).mean() + epsilon)
    kept = weight.data
    try:
        norm.weight.data = torch.full_like(kept, 3.0)
        told = norm.forward(row).float()
    finally:
        norm.weight.data = kept
    return next(
        (one for one in (0.0, 1.0) if torch.allclose(told, (3 + one) * normed, rtol=0.02)), None
    )


def _epsilon(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None
