"""Whether a text ends in a loop: a language model that has lost its thread writes one piece again
and again until its room is used up. More room gives more of the same."""

from __future__ import annotations

LEAST_CHARACTERS, LEAST_TIMES = 400, 4
"""So long must the loop be, and so often must its piece come."""
_SEEN = 8000
"""Characters from the end that are looked at: a piece may have a quarter of them."""


def ends_in_a_loop(text: str) -> bool:
    """Whether the last `LEAST_CHARACTERS` or more are one piece, at least `LEAST_TIMES` in a row.
    The last piece may be cut off, and the piece must be the same to the letter. Time is linear in
    the length of the text.
    """
    end = text.rstrip()[: -_SEEN - 1 : -1]
    # matched[i]: how much of `end` is found again at i (the Z algorithm); a period of i covers
    # that and i more
    matched = [0] * len(end)
    left = right = 0
    for at in range(1, len(end)):
        found = min(matched[at - left], right - at) if at < right else 0
        while at + found < len(end) and end[found] == end[at + found]:
            found += 1
        if at + found > right:
            left, right = at, at + found
        matched[at] = found
        if at + found >= max(LEAST_CHARACTERS, LEAST_TIMES * at):
            return True
    return False
