"""What other packages add: registries of what is ours and of what entry points name.

A package that is installed beside patcher declares entry points of the groups `patcher.engines`,
`patcher.engine_plugins`, `patcher.judges`, `patcher.models`, `patcher.patch_points`,
`patcher.presets`, `patcher.strategies` and `patcher.toolchains`; nothing of it is imported
before it is asked for by name. What is ours is in `plugins.toml`; `plugins` lists
what others bring, for `patcher doctor`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from patcher.bench.errors import MissingError, UsageError
from patcher.bench.records import Record

OURS = "patcher"

T = TypeVar("T")


class Plugin(Record):
    """One thing that can be asked for by name."""

    name: str
    group: str
    """The entry point group."""
    target: str
    """Where it is: `module` or `module:attribute`."""
    origin: str
    """`patcher`, or the distribution that brings it and its version."""
    problem: str = ""
    """Why it is not used; empty where it is, or where it was not imported to find out."""


class Registry(Generic[T]):
    """Names of one kind, ours first; each is imported when it is loaded. Iterates over names.

    A name of ours stays ours: an entry point that takes it has no effect, and `found` says so.
    """

    def __init__(self, kind: str) -> None:
        """Args:
        kind: a table of `plugins.toml`; its entry points are of the group `patcher.KIND`.
        """
        self.group = f"patcher.{kind}"
        self.noun: str = _table()[kind]["noun"]
        self._ours: dict[str, str] = _table()[kind]["ours"]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._ours, *(each.name for each in self._entries())]))

    def __contains__(self, name: object) -> bool:
        return name in self._ours or any(each.name == name for each in self._entries())

    def ours(self, name: str) -> bool:
        """Whether patcher itself brings it."""
        return name in self._ours

    def load(self, name: str) -> T:
        """What has that name.

        Raises:
            UsageError: nothing has it, or two packages do.
            MissingError: its package cannot be imported; the message says why.
        """
        if name in self._ours:
            found: T = _resolved(self._ours[name])
            return found
        entries = [each for each in self._entries() if each.name == name]
        if not entries:
            raise UsageError(f"unknown {self.noun} {name!r}", f"there are: {self.listing()}")
        if len(entries) > 1:
            both = " and ".join(_origin(each) for each in entries)
            raise UsageError(f"{both} both bring the {self.noun} {name!r}", "uninstall one of them")
        return self.load_entry(entries[0])

    def load_entry(self, entry: importlib.metadata.EntryPoint) -> T:
        """What an entry point names. Raises MissingError where it cannot be imported."""
        try:
            found: T = entry.load()
        except (Exception, SystemExit) as error:  # whatever the code of others raises
            raise MissingError(
                f"the {self.noun} {entry.name!r} of {_origin(entry)} cannot be imported: "
                f"{type(error).__name__}: {error}",
                f"repair or uninstall {_distribution(entry)}",
            ) from error
        return found

    def entries(self) -> list[importlib.metadata.EntryPoint]:
        """Entry points of others whose names are not ours, by name."""
        return [each for each in self._entries() if each.name not in self._ours]

    def listing(self) -> str:
        """Every name, those of others with the package that brings them, for a hint."""
        others = [f"{each.name} (from {_origin(each)})" for each in self.entries()]
        return ", ".join([*self._ours, *others]) or "none"

    def found(self, check: bool = False) -> list[Plugin]:
        """All that is there; with `check`, what others bring is imported to find problems."""
        listed = [self._plugin(name, target, OURS) for name, target in self._ours.items()]
        for entry in self._entries():
            problem = ""
            if entry.name in self._ours:
                problem = f"patcher has a {self.noun} of that name, which is used"
            elif sum(each.name == entry.name for each in self._entries()) > 1:
                problem = "another package brings one of that name: neither is used"
            elif check:
                try:
                    self.load_entry(entry)
                except MissingError as error:
                    problem = error.message
            listed.append(self._plugin(entry.name, entry.value, _origin(entry), problem))
        return listed

    def _plugin(self, name: str, target: str, origin: str, problem: str = "") -> Plugin:
        return Plugin(name=name, group=self.group, target=target, origin=origin, problem=problem)

    def _entries(self) -> list[importlib.metadata.EntryPoint]:
        # looked up each time, in milliseconds: what is installed may change while a notebook runs
        found = importlib.metadata.entry_points(group=self.group)
        return sorted(found, key=lambda each: (each.name, each.value))


def plugins(check: bool = True) -> list[Plugin]:
    """What packages other than patcher bring, of every group.

    Args:
        check: whether to import each, so that its `problem` is known.
    """
    found = [each for kind in _table() for each in Registry[Any](kind).found(check)]
    return [each for each in found if each.origin != OURS]


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _resolved(target: str) -> Any:
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module
