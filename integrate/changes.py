"""Changes in an engine since a patch was made for it, function by function."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

from patcher.bench import Record, VerificationError
from patcher.integrate.manifest import Replaced, Target
from patcher.integrate.points import Fingerprint

_LONGEST = 20_000
"""Longest source text of a function or class that a bundle stores, in characters."""
_DIFF_LINES = 40


class Change(Record):
    """One function or class of an engine that differs from the one the patch was made for."""

    name: str
    """The function or class."""
    change: Literal["changed", "gone", "new"]
    """`new`: the adapter did not rely on it when the patch was made."""
    diff: str = ""
    """First lines of a unified diff from then to now; empty if the bundle holds no text."""


def replaced(fingerprint: str) -> tuple[Replaced, ...]:
    """The parts behind a fingerprint, as a bundle stores them."""
    if not isinstance(fingerprint, Fingerprint):
        return ()
    return tuple(
        Replaced(name=name, digest=_digest(text), text=text if len(text) <= _LONGEST else None)
        for name, text in fingerprint.parts.items()
    )


def what_changed(target: Target, now: str) -> list[Change]:
    """The differences behind a changed fingerprint; empty if neither the bundle nor the adapter
    holds its parts.
    """
    if not isinstance(now, Fingerprint):
        return []
    if now.unread is not None:
        return what_is_unread(now.unread, now.parts, target.replaced)
    if not target.replaced:
        return []
    changes = []
    for part in target.replaced:
        text = now.parts.get(part.name)
        if text is None:
            changes.append(Change(name=part.name, change="gone"))
        elif _digest(text) != part.digest:
            changes.append(Change(name=part.name, change="changed", diff=_diff(part, text)))
    known = {part.name for part in target.replaced}
    return changes + [Change(name=name, change="new") for name in now.parts if name not in known]


def what_is_unread(
    unread: Mapping[str, str], now: Mapping[str, str], then: Iterable[Replaced] = ()
) -> list[Change]:
    """The parts of an engine that no version has for which an adapter was written.

    Args:
        unread: see `Fingerprint.unread`.
        now: text by part, as installed.
        then: the parts as a bundle holds them, whose text makes a better diff.
    """
    held = {part.name: part for part in then}
    changes = []
    for name, new in unread.items():
        text = now.get(name, "")
        diff = _diff(held[name], text) if name in held and text else ""
        changes.append(Change(name=name, change="changed" if text else "gone", diff=diff or new))
    return changes


def _diff(part: Replaced, text: str) -> str:
    if part.text is None:
        return ""
    lines = list(
        difflib.unified_diff(
            part.text.splitlines(),
            text.splitlines(),
            f"{part.name} then",
            f"{part.name} now",
            n=1,
            lineterm="",
        )
    )
    left = len(lines) - _DIFF_LINES
    return "\n".join(lines[:_DIFF_LINES] + ([f"... {left} more lines"] if left > 0 else []))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class SourceChangedError(VerificationError):
    """The code that a patch replaces has changed since the patch was made."""

    def __init__(self, message: str, hint: str, changes: tuple[Change, ...]) -> None:
        super().__init__(message, hint)
        self.changes = changes
