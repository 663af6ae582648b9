"""Hostile text made harmless before a person reads it."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Control, bidirectional and other invisible characters shown as `<U+202E>`, not obeyed.

    Source that a model wrote can hide code behind such characters (CVE-2021-42574).
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"<U+{ord(character):04X}>"
    return character
