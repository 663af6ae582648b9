"""The parts of an engine that patch points replace or rely on, and the versions read of them.

Every name is `module:attribute`, as narrow as the reliance: a method, not its class. An adapter's
`sources.json` holds, for each part, the digests of the versions for which the adapter was written
and tested, and short digests of their statements, which show what is new in another version. A
version whose digests are all known is served, whatever its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from patcher.integrate.changes import Change, SourceChangedError, what_is_unread
from patcher.integrate.points import Fingerprint
from patcher.integrate.source_parts import ABSENT, Part
from patcher.integrate.source_tree import SourceTree


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


@dataclass(frozen=True)
class SourceRecord:
    """What was read of an engine."""

    digests: Path
    """The file `sources.json`."""
    tree: type[SourceTree]
    """The engine's files."""

    def readings(self) -> dict[str, Reading]:
        """What the file holds, by part."""
        stored: dict[str, Any] = json.loads(self.digests.read_text(encoding="utf-8"))
        return {
            name: Reading(
                {digest: tuple(versions) for digest, versions in one["versions"].items()},
                frozenset(one["statements"].split()),
            )
            for name, one in stored.items()
        }

    def write(self, known: dict[str, Reading]) -> None:
        """Write the file, a line a part."""
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
        self.digests.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def versions_read(self) -> tuple[str, ...]:
        """The versions of the engine that were read, the oldest first."""
        found = {
            version
            for one in self.readings().values()
            for versions in one.versions.values()
            for version in versions
        }
        return tuple(sorted(found, key=Version))

    def known_versions(self) -> str:
        """The versions in words, such as `vLLM 0.25.1, 0.26.0 or 0.28.0`."""
        *first, last = self.versions_read()
        named = f"{', '.join(first)} or {last}" if first else last
        return f"{self.tree.title} {named}"

    def unread(self, names: Iterable[str], tree: SourceTree) -> dict[str, str]:
        """The parts of an engine that no version read has, each with the lines that are new."""
        known, found = self.readings(), {}
        for name in names:
            reading, now = known.get(name, Reading({})), tree.part(name)
            if now.digest not in reading.versions:
                found[name] = _new_lines(name, reading, now)
        return found

    def changes_of(self, names: Iterable[str], tree: SourceTree) -> list[Change]:
        """The same as `unread`, as changes that are shown to a person."""
        texts = {name: tree.part(name).text for name in names}
        return what_is_unread(self.unread(texts, tree), texts)

    def fingerprint(self, names: tuple[str, ...]) -> Fingerprint:
        """The digest of the installed parts, with their texts and what no version read has.

        Raises:
            MissingError: the engine is not installed.
        """
        tree = self.tree.installed()
        parts = {name: tree.part(name) for name in names}
        return Fingerprint(
            hashlib.sha256("".join(one.digest for one in parts.values()).encode()).hexdigest(),
            parts={name: one.text for name, one in parts.items() if one.digest != ABSENT},
            unread=self.unread(names, tree),
        )

    def must_be_as_read(self, point: str, names: tuple[str, ...]) -> None:
        """Refuse an engine whose code no version read has, whatever its number.

        Raises:
            MissingError: the engine is not installed.
            SourceChangedError: parts differ; the message names them, `changes` holds what is new.
        """
        tree = self.tree.installed()
        if changes := self.changes_of(names, tree):
            raise SourceChangedError(
                f"{', '.join(change.name for change in changes)} of {tree.title} "
                f"{tree.version()} differ from what the adapter of {point} was written for",
                f"serve with {self.known_versions()}, or update the adapter",
                tuple(changes),
            )

    def untested(self) -> str | None:
        """A sentence about an installed version that no one read, though its parts are as read;
        None if it was read.
        """
        version, read = self.tree.installed().version(), self.versions_read()
        if version in read:
            return None
        return (
            f"{self.tree.title} {version} was not tested with these patches ({', '.join(read)} "
            "were); the code that they replace and rely on is the same"
        )


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
