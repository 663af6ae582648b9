"""Hostile text made harmless before a person reads it."""

from __future__ import annotations

import re
import unicodedata

_HARMLESS = re.compile(r"[\x20-\x7e\n\t]*")
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0d\U000e0000-\U000e0fff]"
)
"""Letters and marks that are drawn as nothing: fillers, joiners and selectors of a variant, but for
the two selectors of emoji."""


def visible(text: str) -> str:
    """Control, bidirectional and other invisible characters shown as `<U+202E>`, not obeyed; a half
    of a surrogate pair, which no file can hold, is shown likewise.

    Source that a model wrote can hide code behind such characters (CVE-2021-42574).
    """
    if _HARMLESS.fullmatch(text):
        return text
    return _SUSPECT.sub(_shown, text)


def one_line(text: str, limit: int) -> str:
    """Visible text without line breaks, and not longer than so many characters."""
    line = " ".join(visible(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    if hidden or _UNSEEN.match(character):
        return f"<U+{ord(character):04X}>"
    return character
