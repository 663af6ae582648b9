"""Which modules of a model without weights a point takes that decides by what a module computes.

Each such point says so itself (`ProbedPoint.would_take_of`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from patcher.integrate.transformers.points import POINTS


@lru_cache(maxsize=2)
def _built(config: str) -> Any:
    from patcher.integrate.transformers.places import without_weights

    # experts' kernels take no float32
    return without_weights(json.loads(config), torch.bfloat16).eval()


def taken(point: str, config: Mapping[str, Any]) -> tuple[Any, list[torch.nn.Module]]:
    """The model of a config.json without weights, and the modules in it that a point takes, once
    for each call in a step.

    Raises:
        UsageError: transformers cannot build it.
    """
    model, kind = _built(json.dumps(config)), POINTS[point]
    own: Any = kind(model)
    return model, own.would_take_of(model)
