"""When the loop leaves an op: rules in code, not in a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.attempts import Stop
from patcher.tried import Tried, standing

MAX_FUNCTIONAL_FAILURES = 5
"""Functional rounds in a row that may fail before the loop gives the op up."""


def move_on(tried: Sequence[Tried]) -> Stop | None:
    """Why to stop now, if so."""
    if standing(tried).failures >= MAX_FUNCTIONAL_FAILURES:
        return "functional_failures"
    return None
