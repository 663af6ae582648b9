"""Models by name: ours in `workloads/`, a user's own, and those that other packages bring.

A preset is a TOML file. A user's lie in the folders of `$PATCHER_PRESETS` and in `presets/` of
`$PATCHER_HOME`; a package names its own by an entry point `patcher.presets`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from patcher.bench.errors import MissingError, UsageError
from patcher.bench.plugins import Registry
from patcher.bench.records import Record, obstacle, parse_toml, problem

PACKAGES: Registry[ModuleType] = Registry("presets")
"""Packages whose TOML files are presets."""


class Preset(Record):
    """A model whose public geometry is known, so that it can be built with random weights and no
    download.
    """

    name: str
    summary: str
    architecture: str
    """As transformers names it (`model_type`): `gpt_oss`, `llama`."""
    config: dict[str, Any]
    """Keyword arguments of the Hugging Face configuration class, `num_hidden_layers` among them."""
    dtype: Literal["float32", "bfloat16", "float16"]
    fits_cpu: bool
    """Whether a CPU runs it in seconds."""
    parameters_b: float
    """Billions of parameters."""
    published: dict[str, Any] = Field(default_factory=dict)
    """What the published checkpoint's config.json says beside it: its quantisation."""
    hub_id: str | None = None
    """Where published weights are, if any."""
    batch: int
    input_len: int
    output_len: int

    @field_validator("config")
    @classmethod
    def _has_layers(cls, config: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("num_hidden_layers"), int):
            raise ValueError("must say num_hidden_layers, a whole number")
        return config

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])


def presets() -> dict[str, Preset]:
    """Every preset by name: ours, then the user's, then those of other packages.

    Raises:
        UsageError: a folder of `$PATCHER_PRESETS` does not exist, or a user's preset is not valid
            or has a name that is taken. What other packages bring wrongly is left out:
            `problems` says what.
    """
    found = dict(_ours())
    for folder in filter(None, preset_folders().split(os.pathsep)):
        for file in _files(Path(folder)):
            preset = _read(file)
            if preset.name in found:
                raise UsageError(
                    f"{file} is a preset {preset.name!r}, and there is one of that name",
                    "give it another name",
                )
            found[preset.name] = preset
    return found | {name: one for name, one in _of_packages()[0].items() if name not in found}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: no such preset; or see `presets`.
    """
    found = presets()
    if name not in found:
        wrong = "".join(f"; {problem}" for problem in problems().values())
        raise UsageError(f"unknown model {name!r}", f"presets are: {', '.join(found)}{wrong}")
    return found[name]


def preset_folders() -> str:
    """The user's folders with absolute paths, as `PATCHER_PRESETS` has them, for a process that
    runs elsewhere.

    Raises:
        UsageError: one that `PATCHER_PRESETS` names is no folder, or `PATCHER_HOME` a file.
    """
    named = [each for each in os.environ.get("PATCHER_PRESETS", "").split(os.pathsep) if each]
    for folder in named:
        if not os.path.isdir(folder):
            raise UsageError(
                f"PATCHER_PRESETS names {folder}, which is no folder",
                "fix or unset PATCHER_PRESETS",
            )
    home = Path(os.environ.get("PATCHER_HOME") or Path.home() / ".patcher") / "presets"
    if file := obstacle(home):
        raise UsageError(
            f"{file} is a file, where presets need a folder", "set PATCHER_HOME to a folder"
        )
    folders = [*named, *([str(home)] if home.is_dir() else [])]
    return os.pathsep.join(dict.fromkeys(os.path.abspath(folder) for folder in folders))


def problems() -> dict[str, str]:
    """What is wrong with presets of other packages, in words, by the target of the entry point."""
    return _of_packages()[1]


@cache
def _ours() -> dict[str, Preset]:
    read = map(_read, _files(resources.files("patcher.bench").joinpath("workloads")))
    return {preset.name: preset for preset in read}


def _of_packages() -> tuple[dict[str, Preset], dict[str, str]]:
    found: dict[str, Preset] = {}
    wrong: dict[str, list[str]] = {}
    for entry in PACKAGES.entries():
        said = wrong.setdefault(entry.value, [])
        try:
            for file in _files(resources.files(PACKAGES.load_entry(entry))):
                preset = _read(file)
                if preset.name in found or preset.name in _ours():
                    said.append(f"the preset {preset.name!r} of {entry.value}: the name is taken")
                else:
                    found[preset.name] = preset
        except (MissingError, UsageError) as error:
            said.append(error.message)
    return found, {target: "; ".join(said) for target, said in wrong.items() if said}


def _files(folder: Traversable) -> Iterator[Traversable]:
    files = sorted(folder.iterdir(), key=lambda file: file.name.removesuffix(".toml"))
    return (file for file in files if file.name.endswith(".toml"))


def _read(file: Traversable) -> Preset:
    try:
        return Preset(**parse_toml(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(
            f"{file} is not a valid preset: {problem(error)}",
            "compare it with bench/workloads/gpt-oss-tiny.toml",
        ) from error
