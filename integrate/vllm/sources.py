"""The parts of vLLM's source that patch points replace or rely on, and the versions read of them.

Every name is `module:attribute`, as narrow as the reliance: a method, not its class.
`sources.json` holds, for each part, the digests of the versions for which the adapter was written
and tested, and short digests of their statements, which show what is new in another version. A
version whose digests are all known is served, whatever its number. `python -m
patcher.integrate.vllm.points` compares and writes them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from patcher.bench import MissingError, VerificationError
from patcher.integrate.changes import Change, SourceChangedError, what_is_unread
from patcher.integrate.points import Fingerprint
from patcher.integrate.vllm.tree import ABSENT, Part, Tree

_USER = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
DIGESTS = Path(__file__).with_name("sources.json")


def module(name: str) -> Any:
    """Import a module of the installed vLLM.

    Raises:
        MissingError: vLLM, or a package that its module needs, is not installed.
        VerificationError: this version of vLLM has no such module.
    """
    try:
        if name.startswith("triton_kernels"):
            # vLLM ships, aliases and modifies a copy when the module that uses it is imported
            importlib.import_module(_USER)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.startswith(("vllm.", "triton_kernels")) and missing in name:
            raise VerificationError(
                f"this vLLM has no module {missing}", f"serve with {_known_versions()}"
            ) from error
        raise MissingError(
            f"{missing} is not installed", "pip install vllm, in an environment of its own"
        ) from error


def part(name: str) -> Any:
    """The object `module:attribute.attribute`; None if this version has none.

    Raises:
        MissingError: see `module`.
    """
    where, _, path = name.partition(":")
    value: Any = module(where)
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    return value


@dataclass(frozen=True)
class Reading:
    """What was read of one part."""

    versions: dict[str, tuple[str, ...]]
    """Versions by their digest."""
    statements: frozenset[str] = frozenset()
    """Digests of the statements of all those versions."""

    def and_of(self, version: str, found: Part) -> Reading:
        """The same with another version."""
        others = {
            digest: tuple(each for each in versions if each != version)
            for digest, versions in self.versions.items()
        }
        others[found.digest] = tuple(sorted({*others.get(found.digest, ()), version}, key=Version))
        return Reading(
            {digest: versions for digest, versions in others.items() if versions},
            self.statements | {each.digest for each in found.statements},
        )


def readings() -> dict[str, Reading]:
    """What `sources.json` holds, by part."""
    stored: dict[str, Any] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return {
        name: Reading(
            {digest: tuple(versions) for digest, versions in one["versions"].items()},
            frozenset(one["statements"].split()),
        )
        for name, one in stored.items()
    }


def write(known: dict[str, Reading]) -> None:
    """Write `sources.json`, a line a part."""
    lines = [
        f" {json.dumps(name)}: "
        + json.dumps(
            {
                "versions": dict(sorted(one.versions.items(), key=lambda item: item[1])),
                "statements": " ".join(sorted(one.statements)),
            }
        )
        for name, one in sorted(known.items())
    ]
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def versions_read() -> tuple[str, ...]:
    """The versions of vLLM that were read, the oldest first."""
    found = {
        version
        for one in readings().values()
        for versions in one.versions.values()
        for version in versions
    }
    return tuple(sorted(found, key=Version))


def unread(names: Iterable[str], tree: Tree) -> dict[str, str]:
    """The parts of a vLLM that no version read has, each with the lines that are new in it."""
    known, found = readings(), {}
    for name in names:
        reading, now = known.get(name, Reading({})), tree.part(name)
        if now.digest not in reading.versions:
            found[name] = _new_lines(name, reading, now)
    return found


def fingerprint(names: tuple[str, ...]) -> Fingerprint:
    """The digest of the installed parts, with their texts and what no version read has.

    Raises:
        MissingError: vLLM is not installed.
    """
    tree = Tree.installed()
    parts = {name: tree.part(name) for name in names}
    return Fingerprint(
        hashlib.sha256("".join(one.digest for one in parts.values()).encode()).hexdigest(),
        parts={name: one.text for name, one in parts.items() if one.digest != ABSENT},
        unread=unread(names, tree),
    )


def must_be_as_read(point: str, names: tuple[str, ...]) -> None:
    """Refuse an engine whose code no version read has, whatever its number.

    Raises:
        MissingError: vLLM is not installed.
        SourceChangedError: parts differ; the message names them, `changes` holds what is new.
    """
    tree = Tree.installed()
    if changes := changes_of(names, tree):
        raise SourceChangedError(
            f"{', '.join(change.name for change in changes)} of vLLM {tree.version()} differ from "
            f"what the adapter of {point} was written for",
            f"serve with {_known_versions()}, or update the adapter",
            tuple(changes),
        )


def untested() -> str | None:
    """A sentence about an installed version that no one read, though its parts are as read; None
    if it was read.
    """
    version, read = Tree.installed().version(), versions_read()
    if version in read:
        return None
    return (
        f"vLLM {version} was not tested with these patches ({', '.join(read)} were); the code that "
        "they replace and rely on is the same"
    )


def changes_of(names: Iterable[str], tree: Tree) -> list[Change]:
    """The same as `unread`, as changes that are shown to a person."""
    return what_is_unread(unread(names, tree), {name: tree.part(name).text for name in names})


def _new_lines(name: str, reading: Reading, now: Part) -> str:
    """The statements that no version read has, as a diff; "" if some are only gone or moved."""
    if now.digest == ABSENT or not reading.statements:
        return ""
    versions = sorted({each for some in reading.versions.values() for each in some}, key=Version)
    lines = [f"--- {name} in {', '.join(versions)}", f"+++ {name} now"]
    for statement in now.statements:
        if statement.digest not in reading.statements:
            lines.append(f"@@ line {statement.line} @@")
            lines += [f"+{line}" for line in statement.text.splitlines()]
    return "\n".join(lines) if len(lines) > 2 else ""


def _known_versions() -> str:
    *first, last = versions_read()
    return f"vLLM {', '.join(first)} or {last}" if first else f"vLLM {last}"
