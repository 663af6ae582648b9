"""Which patch points a model of transformers has layers for, by its config.json.

Files of transformers are read, not imported: an import takes seconds. Only a class of norms whose
source was not read before is built, to see what it computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from patcher.bench import VerificationError
from patcher.integrate.source_parts import class_digests
from patcher.integrate.source_tree import SourceTree

LAYERS: Mapping[str, str | None] = {
    "gpt_oss.decoder_layer": "gpt_oss",
    "gpt_oss.experts": "gpt_oss",
    "gpt_oss.rotary_embedding": "gpt_oss",
    "gpt_oss.router": "gpt_oss",
    "norm": None,
    "gemma_norm": None,
}
"""The architecture that a patch point is of, by its name; None for a role that any may have."""
NORMS: Mapping[str, tuple[str, str]] = {
    "norm": ("rms_norm", "its weight alone"),
    "gemma_norm": ("gemma_rms_norm", "one more than its weight"),
}
"""By point: the op that its norms compute, and what they multiply by."""


class TransformersTree(SourceTree):
    """A folder that holds the package `transformers`."""

    package: ClassVar[str] = "transformers"
    title: ClassVar[str] = "transformers"


def of_model(point: str, config: Callable[[], Mapping[str, Any]]) -> str:
    """The layers that a patch point has in a model.

    Args:
        point: the point's name.
        config: reads the model's config.json.

    Raises:
        VerificationError: it has none; the message says why.
        MissingError: transformers is not installed.
    """
    model, alone = config(), LAYERS[point]
    if alone is None:
        return _norms_of(point, model)
    kind = str(model.get("model_type"))
    names = ", ".join(map(str, model.get("architectures") or ())) or kind
    if kind != alone:
        raise VerificationError(
            f"{names} has no layer of {point}, which is of {alone.replace('_', '-')} alone",
            "take an engine whose patch points fit any model: --engine vllm",
        )
    return f"{names} has layers of {point}"


def _norms_of(point: str, config: Mapping[str, Any]) -> str:
    op, gain = NORMS[point]
    kind = str(config.get("model_type"))
    text = config.get("text_config") or {}
    names = dict.fromkeys([str(text.get("model_type", kind)), kind])
    found = [name for each in names for name in norm_classes(each, op)]
    if not found:
        raise VerificationError(
            f"no norm of {kind} in transformers multiplies by {gain}",
            "its norms are of another kind; name another op",
        )
    return f"{kind} has {', '.join(dict.fromkeys(found))}"


def norm_classes(architecture: str, op: str = "rms_norm") -> Iterator[str]:
    """The classes in an architecture's own file whose objects compute an op.

    Raises:
        MissingError: transformers is not installed.
    """
    folder = _folder(TransformersTree.installed().folder / "transformers/models", architecture)
    file = None if folder is None else folder / f"modeling_{folder.name}.py"
    if file is None or not file.is_file():
        return
    for name, digest in class_digests(file, "Norm"):
        known = _read()
        if digest in known:
            computes = known[digest]
        else:
            from patcher.integrate.transformers.norm import class_computes

            computes = class_computes(f"transformers.models.{file.parent.name}.{file.stem}", name)
        if computes == op:
            yield name


def _folder(models: Path, architecture: str) -> Path | None:
    """The folder of an architecture; that of `gemma3_text` is `gemma3`, as its files say."""
    if (models / architecture).is_dir():
        return models / architecture
    mark = f'model_type = "{architecture}"'
    for file in sorted(models.glob("*/configuration_*.py")):
        if mark in file.read_text(encoding="utf-8"):
            return file.parent
    return None


@cache
def _read() -> dict[str, str | None]:
    """The op that a class computes, by the digest of its source: built and tried once."""
    kept = json.loads(Path(__file__).with_name("norms.json").read_text(encoding="utf-8"))
    return {digest: op or None for op, digests in kept.items() for digest in digests}
