"""Strategies: given the attempts so far, what to ask next.

A strategy is a pure function of the attempts, so that a resumed run goes on exactly as it would
have. To add one: a class with `name` and `next`, and its line in `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from patcher.strategies.refine import Refine
from patcher.tried import Ask, Tried


class Strategy(Protocol):
    """What decides."""

    @property
    def name(self) -> str: ...

    def next(self, tried: Sequence[Tried], left: int) -> tuple[Ask, ...]:
        """What to ask together in the next round: at most `left` (at least one) candidates, whose
        parents are among those tried; () when it has nothing more to ask."""
        ...


__all__ = ["Refine", "Strategy"]
