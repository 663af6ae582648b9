"""Kernel names cut to a width, keeping what tells each from the others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from patcher.hotspot.names import mangled_parts, match_key, normalise, printable

CUT = "\N{HORIZONTAL ELLIPSIS}"
_OWNED = re.compile(r"(?:\w+::)*(\w+)::(kernel|kentry|device_kernel|Kernel2?|globalKernel)\b")
_PART = re.compile(r"[_<>,:(){} ]")


def shortened(names: Sequence[str], width: int, cut: str = CUT) -> list[str]:
    """The names without namespaces and arguments, each in at most `width` characters.

    A name that is too long keeps its beginning and the first part in which it differs from the name
    that is most like it.
    """
    spelled = [_spelled(name) for name in names]
    return [name if len(name) <= width else _cut(name, spelled, width, cut) for name in spelled]


def _spelled(name: str) -> str:
    """The name without namespaces, but for a function that only its namespace tells apart."""
    identifiers, rest = mangled_parts(name)
    if identifiers:
        return printable(f"{identifiers[-1]} {rest}")
    key = match_key(name)
    owner = _OWNED.match(normalise(name))
    return printable(f"{owner[1]}::{key}" if owner and key.startswith(owner[2]) else key)


def _cut(name: str, names: Sequence[str], width: int, cut: str) -> str:
    room = max(width - len(cut), 1)
    alike = max((_common(name, other) for other in names if other != name), default=0)
    if alike < room or room < 16:
        return name[:room] + cut
    begin = max((m.end() for m in _PART.finditer(name, 0, alike)), default=alike)
    left = room - room // 3
    begin = max(begin, alike - left // 2)  # the difference itself must be seen
    tail = name[begin:]
    if len(tail) > left:
        tail = tail[: left - len(cut)] + cut
    return name[: room - len(tail)] + cut + tail


def _common(one: str, other: str) -> int:
    """The length of the common beginning."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
