"""Which modules of a model without weights the points of roles take.

They decide by what a module computes. Without weights a router and a norm are tried with others,
and a rotation on the shapes that its attention gives it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from patcher.integrate.transformers.add_norm import AddNorms
from patcher.integrate.transformers.linear import Linears
from patcher.integrate.transformers.norm import FORMULAS, computes_norm
from patcher.integrate.transformers.residual_layers import find_layers
from patcher.integrate.transformers.rotation import Rotations, rotaries_of
from patcher.integrate.transformers.rotation_probe import HeadRotation, turn_of
from patcher.integrate.transformers.topk_router import Recipe, Routers, recipe_of


@lru_cache(maxsize=2)
def _built(config: str) -> Any:
    from patcher.integrate.transformers.places import without_weights

    # experts' kernels take no float32
    return without_weights(json.loads(config), torch.bfloat16).eval()


def taken(point: str, config: Mapping[str, Any]) -> tuple[Any, list[torch.nn.Module]]:
    """The model of a config.json without weights, and the modules in it that a point takes: one
    whose forward calls the kernel twice is there twice.

    Raises:
        UsageError: transformers cannot build it.
    """
    model = _built(json.dumps(config))
    if point == AddNorms.name:
        calls = find_layers(model, _is_norm).calls
        return model, [layer for layer, often in calls.items() for _ in range(often)]
    kind: Any = next(each for each in (Linears, Routers, Rotations) if each.name == point)
    of_role = kind(model).of_role
    return model, [each for each in model.modules() if of_role(each) and _takes(point, model, each)]


def _takes(point: str, model: Any, module: Any) -> bool:
    if point == Linears.name:
        return Linears.by_its_class(module) is None
    if point == Rotations.name:
        return isinstance(turn_of(module, rotaries_of(model)), HeadRotation)
    try:
        return isinstance(recipe_of(_with_weights(module)), Recipe)
    except RuntimeError:  # its settings do not fit together
        return False


def _is_norm(norm: Any) -> bool:
    return computes_norm(_with_weights(norm), FORMULAS["rms_norm"])


def _with_weights(module: Any) -> Any:
    held = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in (*held.parameters(), *held.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor)
    return held
