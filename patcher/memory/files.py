"""The files of a memory: TOML that a person may edit, changed by several processes at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomlkit
from pydantic import ValidationError
from tomlkit.items import AoT

from patcher.bench import UsageError, first_error, parse_toml
from patcher.memory.entries import Gain, MemoryRule
from patcher.runs import durable

MOST = 500
"""Entries a file holds; those seen least and longest ago go first."""
_SAYS = {
    "rules.toml": "# What failed before, counted by candidates; from three on it enters prompts.\n",
    "techniques.toml": "# What a change was worth, as measured: gain = time before / time after.\n",
}
_EDIT = (
    "# Yours to edit: change a text, delete an entry, or say `muted = true` to keep it unshown.\n"
)

EntryT = TypeVar("EntryT", MemoryRule, Gain)


class TomlStore:
    """One file of entries, `[[rule]]` or `[[technique]]`.

    Raises:
        UsageError: the file is no TOML, or an entry does not fit; it names the line.
    """

    def __init__(self, path: Path, table: str) -> None:
        self.path, self.table = path, table

    def read(self, kind: type[EntryT]) -> list[EntryT]:
        return self._parse(self._text(), kind)

    def change(
        self, kind: type[EntryT], change: Callable[[list[EntryT]], Sequence[EntryT]]
    ) -> None:
        """Read, change and write as one, whoever else does the same. What a person wrote between
        the entries stays."""
        with self._locked():
            text = self._text()
            before = self._parse(text, kind)
            after = _pruned(change(before))
            if after != before:
                # tomlkit would write on where the last line has no end
                ended = text if not text or text.endswith("\n") else text + "\n"
                written = self._rewritten(ended, before, after)
                if {entry.id: entry for entry in self._parse(written, kind)} != {
                    entry.id: entry for entry in after
                }:
                    raise UsageError(
                        f"{self.path} is written in a way that cannot be added to",
                        f"write each entry as [[{self.table}]] and one value a line",
                    )
                # a link stays a link: what it points to is replaced
                durable.write_whole(self.path.resolve(), written)

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {self.path}: {error}", _mend(self.path)) from error

    def _parse(self, text: str, kind: type[EntryT]) -> list[EntryT]:
        try:
            found = parse_toml(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{self.path}: {error}", _mend(self.path)) from error
        if unknown := sorted(set(found) - {self.table}):
            raise self._wrong(
                _line(text, rf"\[*[ \t]*{re.escape(unknown[0])}\b"), "is unknown here"
            )
        entries: list[EntryT] = []
        tables = found.get(self.table, [])
        if len(tables) != len(self._headers(text)):
            line = _line(text, rf"\[?[ \t]*{self.table}\b")
            raise self._wrong(line, f"each entry begins with a line [[{self.table}]]")
        for number, values in enumerate(tables):
            try:
                entry = kind.model_validate(values)
            except ValidationError as error:
                where, wrong, _ = first_error(error)
                field = str(where[0]) if where else ""
                line = self._line_of(text, number, field)
                raise self._wrong(line, f"{field}: {wrong}".lstrip(": ")) from error
            if any(entry.id == other.id for other in entries):
                raise self._wrong(
                    self._line_of(text, number, "id"), f"the id {entry.id!r} is there twice"
                )
            entries.append(entry)
        return entries

    def _line_of(self, text: str, number: int, field: str) -> int:
        """The line of an entry's field, or of its header where it has no such field."""
        headers = [*self._headers(text), len(text.splitlines()) + 1]
        begin, end = headers[number], headers[number + 1]
        inside = [at for at in _lines(text, rf"{re.escape(field)}[ \t]*=") if begin < at < end]
        return inside[0] if field and inside else begin

    def _headers(self, text: str) -> list[int]:
        return _lines(text, rf"\[\[[ \t]*{self.table}[ \t]*\]\]")

    def _wrong(self, line: int, problem: str) -> UsageError:
        return UsageError(f"{self.path}, line {line}: {problem}", _mend(self.path))

    def _rewritten(self, text: str, before: list[EntryT], after: Sequence[EntryT]) -> str:
        document = tomlkit.parse(text or _SAYS.get(self.path.name, "") + _EDIT + "\n")
        tables = document.get(self.table)
        if not isinstance(tables, AoT):
            tables = tomlkit.aot()
            document[self.table] = tables
        wanted = {entry.id: entry for entry in after}
        for at in range(len(before) - 1, -1, -1):
            old, new = before[at], wanted.pop(before[at].id, None)
            if new is None:
                del tables[at]
            else:
                was, now = _plain(old), _plain(new)
                tables[at].update({k: now[k] for k in now if now[k] != was[k]})
        for entry in wanted.values():
            table = tomlkit.table()
            table.update(_plain(entry))
            tables.append(table)
        return tomlkit.dumps(document)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path.parent / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # freed when its holder dies
            yield
        finally:
            os.close(handle)


def _plain(entry: MemoryRule | Gain) -> dict[str, Any]:
    values = entry.model_dump(mode="json")
    return {name: value for name, value in values.items() if value is not None}


def _pruned(entries: Sequence[EntryT]) -> list[EntryT]:
    def worth(entry: EntryT) -> tuple[bool, int, str]:
        return entry.muted, entry.count, entry.last

    kept = {entry.id for entry in sorted(entries, key=worth, reverse=True)[:MOST]}
    return [entry for entry in entries if entry.id in kept]


def _lines(text: str, pattern: str) -> list[int]:
    matches = re.finditer(rf"^[ \t]*{pattern}", text, re.MULTILINE)
    return [1 + text.count("\n", 0, match.start()) for match in matches]


def _line(text: str, pattern: str) -> int:
    return next(iter(_lines(text, pattern)), 1)


def _mend(path: Path) -> str:
    return f"correct that line, or move {path} away: what it held is learned anew"


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {path}: {error.strerror}",
        'set memory = "off" or another folder in patcher.toml',
    )
