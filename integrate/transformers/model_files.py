"""The files of transformers that have a model's code and settings: found, not imported."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import ClassVar

from patcher.integrate.source_tree import SourceTree


class TransformersTree(SourceTree):
    """A folder that holds the package `transformers`."""

    package: ClassVar[str] = "transformers"
    title: ClassVar[str] = "transformers"


def _models() -> Path:
    return TransformersTree.installed().folder / "transformers/models"


def modeling_file(architecture: str) -> Path | None:
    """The file that has the model of an architecture; that of `internlm3` is Llama's."""
    folder = folder_of(architecture)
    if folder is None:
        return None
    own = folder / f"modeling_{folder.name}.py"
    if own.is_file():
        return own
    return _file_of_another(_models(), architecture)


@cache
def _file_of_another(models: Path, architecture: str) -> Path | None:
    """The file of another architecture that has the model of this one: all files are read."""
    table = (models / "auto/modeling_auto.py").read_text(encoding="utf-8")
    for name in re.findall(rf'\("{re.escape(architecture)}", "(\w+)"\)', table):
        for file in sorted(models.glob("*/modeling_*.py")):
            if f"\nclass {name}(" in file.read_text(encoding="utf-8"):
                return file
    return None


def folder_of(architecture: str) -> Path | None:
    """The folder of an architecture; that of `gemma3_text` is `gemma3`, as its files say."""
    models = _models()
    if re.fullmatch(r"[\w-]+", architecture) and (models / architecture).is_dir():
        return models / architecture
    mark = f'model_type = "{architecture}"'
    for file in sorted(models.glob("*/configuration_*.py")):
        if mark in file.read_text(encoding="utf-8"):
            return file.parent
    return None
