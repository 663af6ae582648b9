"""A prompt's room: what is optional is cut in a fixed order until the rest fits, and the prompt
says what was cut. Profiles and logs are long, signal is sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping

CHARACTERS_PER_TOKEN = 3.5
"""An estimate on the safe side for code and English: no tokenizer is asked."""
PARTS = {
    "unlike": "known designs",
    "baseline": "the baseline's source",
    "history": "earlier attempts",
    "counters": "hardware counters",
    "extra": "further notes",
    "known_kernels": "kernels that work elsewhere",
    "log": "output of the tools",
}
"""What may be cut, the first first, and how a prompt calls it. The contract, the rules, the kernel
in question, its verdict and the task are never cut."""
_LEAST = 400
"""Characters below which a part is left out whole."""
_TAIL_KEPT = ("history",)
"""Parts of which the end matters; their first two lines are a title and a table's head."""


def characters(tokens: int) -> int:
    """How many characters so many tokens are, about."""
    return int(tokens * CHARACTERS_PER_TOKEN)


def fitted(
    render: Callable[[Mapping[str, str], list[str]], str], parts: Mapping[str, str], room: int
) -> str:
    """The text that `render(parts, what was cut)` makes, cut until it has at most `room`
    characters; longer only if what is never cut is.
    """
    kept = {name: parts.get(name, "") for name in PARTS}
    cut: dict[str, str] = {}
    while True:
        text = render(kept, list(cut.values()))
        over = len(text) - room
        name = next((name for name in PARTS if kept[name]), None)
        if over <= 0 or name is None:
            return text
        # the sentence that says so needs room, too
        least = len(kept[name]) - over - (0 if name in cut else 100)
        if name not in cut and least >= _LEAST:
            kept[name] = _shorter(kept[name], least, tail=name in _TAIL_KEPT)
        else:
            kept[name] = ""
        lost = len(parts[name]) - len(kept[name])
        how = "in part" if kept[name] else "whole"
        cut[name] = f"{PARTS[name]} ({how}: {lost:,} characters)"


def _shorter(text: str, room: int, *, tail: bool) -> str:
    """Whole lines from the beginning, or the head and whole lines from the end."""
    lines = text.splitlines(keepends=True)
    head = lines[:3] if tail else []
    rest = lines[len(head) :]
    left = room - sum(len(line) for line in head)
    chosen: list[str] = []
    for line in reversed(rest) if tail else rest:
        left -= len(line)
        if left < 0:
            break
        chosen.append(line)
    body = "".join(head + chosen[::-1] if tail else chosen)
    # A fence that was opened and not closed would swallow the rest of the prompt.
    fence = next((line.strip() for line in chosen if line.startswith("```")), "")
    marks = fence[: len(fence) - len(fence.lstrip("`"))]
    open_ = bool(marks) and sum(line.startswith(marks) for line in chosen) % 2 == 1
    return body + (f"{marks}\n" if open_ else "")
