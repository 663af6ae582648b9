"""The rules in the TOML files of this folder, each read once."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def rules(name: str) -> dict[str, Any]:
    """The contents of a TOML file of this folder, by its name without suffix."""
    return tomllib.loads(
        resources.files("patcher.hotspot").joinpath(f"{name}.toml").read_text("utf-8")
    )
