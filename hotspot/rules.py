"""Rules that are data: the TOML files beside this one, each read once."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def rules(name: str) -> dict[str, Any]:
    """`families`, `advice` or `gpus`: see the file of that name."""
    return tomllib.loads(
        resources.files("patcher.hotspot").joinpath(f"{name}.toml").read_text("utf-8")
    )
