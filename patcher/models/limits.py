"""Limits that a server names when it refuses a request: read once, then kept to."""

from __future__ import annotations

import re

LEAST_ROOM = 1024
"""With less room than this, in tokens, nothing is asked."""
_SUM = re.compile(r"(\d+) \+ (\d+) > (\d+)")
_CONTEXT = re.compile(r"context (?:length|limit|window|size)\D{0,20}(\d+)")
_PROMPT = re.compile(
    r"(\d+) (?:tokens )?(?:in the messages|in the prompt|input tokens|tokens of input)"
    r"|prompt (?:contains|has|of)(?: at least)? (\d+)"
)
_OUTPUT = re.compile(r"max_(?:completion_|output_|new_)?tokens|(?:output|completion) tokens")


def smaller_room(message: str, room: int) -> int | None:
    """The room for a reply that a server allows, by its refusal of a request with `room` tokens;
    None where it names none, or none that is of use."""
    said = re.sub(r"(?<=\d),(?=\d{3})", "", message[:2000])
    found = 0
    if match := _SUM.search(said):  # prompt + room > context
        found = int(match[3]) - int(match[1])
    elif match := _CONTEXT.search(said):
        prompt = _PROMPT.search(said)
        found = int(match[1]) - int(prompt[1] or prompt[2]) if prompt else 0
    elif _OUTPUT.search(said):
        numbers = (int(number) for number in re.findall(r"\d{1,9}", said))
        found = max((number for number in numbers if number < room), default=0)
    return found if LEAST_ROOM <= found < room else None
