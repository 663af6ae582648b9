"""Memory across runs: rules of what failed and measured gains of what worked.

Two TOML files in one folder of the user (`PATCHER_HOME`'s `memory/`, or the settings' own), which a
person may open and edit. Of sources, prompts and replies nothing enters but words of a closed list
(`screen.py`). After AdaExplore's negative rules with counts and KernelBlaster's techniques with
their actual gain.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from patcher.bench import Contract, Language, Record, UsageError, obstacle
from patcher.integrate import home_store
from patcher.memory.entries import PROMOTED, Gain, MemoryRule, Observation
from patcher.memory.files import TomlStore
from patcher.memory.learn import Experience, Where, gains_after, rule_after
from patcher.memory.recall import MemoryText, recall


class LessonIds(Record):
    """What a run added."""

    rules: tuple[str, ...] = ()
    """Ids of rules that are new or were seen once more."""
    techniques: tuple[str, ...] = ()


class Memory:
    """A folder with `rules.toml` and `techniques.toml`; made when something is learned.

    Raises:
        UsageError: of every method: a file cannot be read or written, or an edit broke it; the line
        is named.
        MissingError: the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rules = TomlStore(folder / "rules.toml", "rule")
        self._gains = TomlStore(folder / "techniques.toml", "technique")

    def rules(self) -> list[MemoryRule]:
        return self._rules.read(MemoryRule)

    def techniques(self) -> list[Gain]:
        return self._gains.read(Gain)

    def recall(self, where: Where) -> MemoryText:
        """What a run on such work should be told."""
        return recall(self.rules(), self.techniques(), where)

    def learn(
        self, run: str, contract: Contract, language: Language, seen: Sequence[Experience]
    ) -> LessonIds:
        """Take up what a run tried on one op. Learning the same again changes nothing."""
        day = datetime.now(UTC).date().isoformat()
        learned: dict[str, dict[str, None]] = {"rules": {}, "techniques": {}}
        tried = [
            (
                each,
                Where.of(contract, language, each.evaluation.environment),
                Observation.of(run, each.evaluation.digest),
            )
            for each in seen
        ]

        def with_rules(rules: list[MemoryRule]) -> list[MemoryRule]:
            known = {rule.id: rule for rule in rules}
            for each, where, sighting in tried:
                rule = rule_after(list(known.values()), where, each, sighting, day)
                if rule is not None and rule != known.get(rule.id):
                    known[rule.id] = rule
                    learned["rules"][rule.id] = None
            return list(known.values())

        def with_gains(gains: list[Gain]) -> list[Gain]:
            known = {gain.id: gain for gain in gains}
            for each, where, sighting in tried:
                found = gains_after(list(known.values()), where, contract, each, sighting, day)
                for gain in list(found):
                    if gain != known.get(gain.id):
                        known[gain.id] = gain
                        learned["techniques"][gain.id] = None
            return list(known.values())

        self._rules.change(MemoryRule, with_rules)
        self._gains.change(Gain, with_gains)
        return LessonIds(rules=tuple(learned["rules"]), techniques=tuple(learned["techniques"]))

    def forget(self, ids: Iterable[str], *, dry_run: bool = False) -> tuple[str, ...]:
        """Remove entries; which they were, or with `dry_run` would have been.

        Raises:
            UsageError: an id is not there; then nothing is removed.
        """
        asked = set(ids)
        known = {entry.id for entry in (*self.rules(), *self.techniques())}
        if unknown := sorted(asked - known):
            raise UsageError(f"memory has no entry {unknown[0]!r}", "ids: patcher memory show")
        if not dry_run:
            self._rules.change(
                MemoryRule, lambda rules: [each for each in rules if each.id not in asked]
            )
            self._gains.change(Gain, lambda gains: [each for each in gains if each.id not in asked])
        return tuple(sorted(asked))


def open_memory(setting: str) -> Memory | None:
    """The memory that the setting `memory` names: `on` (the user's own), `off` (None), or a
    folder.

    Raises:
        UsageError: it is a file.
    """
    match setting:
        case "off":
            return None
        case "on":
            return Memory(home_store().root / "memory")
    folder = Path(os.path.expanduser(setting))
    if file := obstacle(folder):
        raise UsageError(
            f"{file} is a file, where memory needs a folder",
            'set memory = "on", "off" or a folder in patcher.toml',
        )
    return Memory(folder)


__all__ = [
    "PROMOTED",
    "Experience",
    "Gain",
    "LessonIds",
    "Memory",
    "MemoryRule",
    "MemoryText",
    "Where",
    "open_memory",
]
