"""The parts of transformers' source that patch points replace or rely on, and the versions read.

Every name is `module:attribute`. `sources.json` holds, for each part, the digests of the versions
with which the patch points were tested; a version whose digests are all known is served.
`python -m patcher.integrate.transformers.sources` adds the installed version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from patcher.bench import MissingError
from patcher.integrate.points import Fingerprint
from patcher.integrate.source_parts import ABSENT, Part, read_part

DIGESTS = Path(__file__).with_name("sources.json")
MODEL = "transformers.models.gpt_oss.modeling_gpt_oss"
MOE = "transformers.integrations.moe"


def fingerprint(names: Iterable[str]) -> Fingerprint:
    """The digest of the installed parts, with their texts and those that no version read has.

    Raises:
        MissingError: transformers is not installed.
    """
    known, parts = readings(), {name: _installed(name) for name in names}
    return Fingerprint(
        hashlib.sha256("".join(one.digest for one in parts.values()).encode()).hexdigest(),
        parts={name: one.text for name, one in parts.items() if one.digest != ABSENT},
        unread={name: "" for name, one in parts.items() if one.digest not in known.get(name, {})},
    )


def readings() -> dict[str, dict[str, list[str]]]:
    """The versions that were read, by part and digest."""
    found: dict[str, dict[str, list[str]]] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return found


def read_installed(names: Iterable[str]) -> None:
    """Add the installed version to `sources.json`.

    Raises:
        MissingError: transformers is not installed.
    """
    known, version = readings(), importlib.metadata.version("transformers")
    for name in names:
        versions = known.setdefault(name, {})
        same = versions.setdefault(_installed(name).digest, [])
        if version not in same:
            same.append(version)
            same.sort(key=Version)
    lines = [f" {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _installed(name: str) -> Part:
    module, _, path = name.partition(":")
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise MissingError("transformers is not installed", "pip install transformers")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    return read_part(file, path) if file.is_file() else Part(ABSENT)


if __name__ == "__main__":
    from patcher.integrate.transformers import POINTS

    read_installed(name for point in POINTS.values() for name in point.relies_on)
