"""Text of others in a prompt: shortened, and fenced so that it stays data."""

from __future__ import annotations

import re

LOG_LIMIT = 6000
"""Characters of compiler or run-time output that a prompt quotes: profiles and logs are long,
signal is sparse."""


def clip(text: str, limit: int = LOG_LIMIT, *, head: bool) -> str:
    """Shorten a log: of a compiler the head tells most, of a traceback the tail."""
    text = text.strip()
    if len(text) <= limit:
        return text
    left = f"[... {len(text) - limit} characters left out ...]"
    first = limit * 3 // 4 if head else limit // 4
    return f"{text[:first]}\n{left}\n{text[len(text) - (limit - first) :]}"


def quote(text: str, tag: str = "text") -> str:
    """A fenced block that nothing in the text can close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{tag}\n{text.rstrip()}\n{fence}"
