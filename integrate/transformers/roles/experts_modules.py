"""Which modules of a model are experts that transformers' registry of functions runs.

Their class has the decorator `use_experts_implementation`: its forward looks up a function by name
at each call. Experts of another kind are told by what they hold: a matrix down for each expert.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from patcher.integrate.transformers.parts import kind_of, some_numbers

TOKENS = 3
"""Of a probe."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
ROUGH = 0.02
"""Of the largest output of a probe, by its dtype: others are rounded several times."""


def are_experts(module: Any) -> bool:
    """Whether a module holds the weights of several experts."""
    return _interface(kind_of(module)) is not None or any(
        name.startswith("down_proj") and held.dim() >= 3
        for name, held in module.named_parameters(recurse=False)
    )


def of_another_class(module: Any) -> str | None:
    """Why a module's own functions are not transformers' for weights as they are; None if they are.

    It needs no weights in memory.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    kind = kind_of(module)
    interface, weight = _interface(kind), module._parameters.get("down_proj")
    if weight is not None and (weight.dtype.itemsize < 2 or not weight.is_floating_point()):
        return f"its weights are quantised ({str(weight.dtype).removeprefix('torch.')})"
    if interface is None:
        return f"{kind.__name__} has a forward of its own"
    if interface is not ALL_EXPERTS_FUNCTIONS:
        return f"{kind.__name__} has functions of its own"
    if hasattr(module, "parametrizations"):
        return "its weights are parametrised"
    if weight is None or weight.dim() != 3:
        return "its weights are no matrices, one an expert"
    return None


def not_in_memory(module: Any) -> str | None:
    """Why a module cannot be tried; None if it can."""
    if any(held.is_meta for held in module.parameters()):
        return "its weights are not in memory"
    return None


def changed(experts: Any) -> str | None:
    """Why a module that was tried is another one now; None if it is the same."""
    if hasattr(experts, "parametrizations"):
        return "experts' weights are parametrised"
    if len(experts.down_proj) != experts.num_experts:
        return "experts are spread over devices"
    return None


def some_calls(experts: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What to try experts on: states [tokens, hidden], choices and weights [tokens, 2], as they
    come from a router; of one expert alone [tokens, 1]."""
    weight, count = experts.down_proj, int(experts.num_experts)
    size = weight.shape[2] if experts.is_transposed else weight.shape[1]
    hidden = some_numbers(TOKENS, size).to(weight.device, weight.dtype)
    first = torch.tensor([0, count - 1, count // 2], device=weight.device)
    chosen = torch.stack([first, (first + 1) % count], 1)[:, : min(2, count)]
    gains = torch.tensor([[0.75, 0.25], [0.5, -0.5], [0.125, 1.5]], device=weight.device)
    return hidden, chosen, gains[:, : chosen.shape[1]].to(weight.dtype)


def alike(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of a probe are the same but for rounding."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    limit = TOLERANCES.get(expected.dtype, ROUGH) * float(expected.abs().max())
    return torch.allclose(got.float(), expected.float(), rtol=0, atol=limit)


def _interface(kind: type[Any]) -> Any:
    """The registry in which a class's forward looks up its function; None if it has no such one."""
    from transformers.integrations import moe

    forward = kind.forward
    if not inspect.isfunction(forward) or forward.__code__.co_filename != moe.__file__:
        return None
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface")
