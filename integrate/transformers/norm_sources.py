"""What the norms in the file of an architecture compute: known by their source, or tried once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from patcher.integrate.source_parts import class_digests


def norm_classes(file: Path, op: str = "rms_norm") -> Iterator[str]:
    """The classes of norms in a file whose objects compute an op."""
    for name, digest in class_digests(file, "Norm"):
        known = _read()
        if digest in known:
            computes = known[digest]
        else:
            from patcher.integrate.transformers.roles.norm import class_computes

            computes = class_computes(f"transformers.models.{file.parent.name}.{file.stem}", name)
        if computes == op:
            yield name


@cache
def _read() -> dict[str, str | None]:
    """The op that a class computes, by the digest of its source: built and tried once."""
    kept = json.loads(Path(__file__).with_name("norms.json").read_text(encoding="utf-8"))
    return {digest: op or None for op, digests in kept.items() for digest in digests}
