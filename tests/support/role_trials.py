"""The rotations and the forwards of routers in transformers' files, each tried by itself.

`python tests/support/role_trials.py` writes `integrate/transformers/roles.json`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from patcher.integrate.transformers.places import TransformersTree
from patcher.integrate.transformers.role_sources import has_no_settings, rotations, routers
from patcher.integrate.transformers.roles import rotation_probe
from patcher.integrate.transformers.roles.topk_router import Recipe, recipe_of

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "integrate/transformers/roles.json"
_EXPERTS, _HIDDEN, _HEAD = 8, 16, 16


def files() -> list[Path]:
    models = TransformersTree.installed().folder / "transformers/models"
    return sorted(models.glob("*/modeling_*.py"))


def _module(file: Path) -> Any:
    return importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")


def turns(function: Any) -> bool:
    """Whether a rotation does as `rope` does, of whole heads or of their first halves."""
    torch.manual_seed(0)
    tokens = len(rotation_probe.POSITIONS)
    heads = torch.randn(1, 4, tokens, _HEAD), torch.randn(1, 2, tokens, _HEAD)
    for size in (_HEAD, _HEAD // 2):
        angles = rotation_probe._some_angles(torch.empty(1, tokens, size))
        try:
            found = rotation_probe._turn("it", function, (*heads, *angles), 1)
        except (RuntimeError, TypeError, ValueError):
            continue
        if not isinstance(found, str):
            return True
    return False


def routes(kind: Any) -> bool:
    """Whether the forward of a class of routers does as `moe_topk` does."""
    torch.manual_seed(0)
    for biased in (False, True):
        router: Any = type(kind.__name__, (torch.nn.Module,), {"forward": kind.forward})()
        router.weight = torch.nn.Parameter(torch.randn(_EXPERTS, _HIDDEN))
        router.top_k, router.hidden_dim = 2, _HIDDEN
        if biased:
            router.bias = torch.nn.Parameter(torch.randn(_EXPERTS))
        try:
            if isinstance(recipe_of(router), Recipe):
                return True
        except (AttributeError, TypeError):  # it wants a bias, or calls the forward of its base
            continue
    return False


def tried() -> dict[str, list[str]]:
    """The digests of what does as an op does, by point; one file of each digest is imported."""
    found: dict[str, dict[str, bool]] = {"rotation": {}, "router": {}}
    for point, digest, file, name in _all():
        if digest not in found[point]:
            part = getattr(_module(file), name)
            found[point][digest] = turns(part) if point == "rotation" else routes(part)
    return {point: sorted(d for d, right in each.items() if right) for point, each in found.items()}


def _all() -> Iterator[tuple[str, str, Path, str]]:
    for file in files():
        for name, digest in rotations(file):
            yield "rotation", digest, file, name
        for name, forward, digest in routers(file):
            if has_no_settings(forward):
                yield "router", digest, file, name


if __name__ == "__main__":
    KEPT.write_text(json.dumps(tried(), indent=1) + "\n", encoding="utf-8")
