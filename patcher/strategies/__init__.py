"""Strategies: given the attempts so far, what to ask next.

A strategy is a pure function of the attempts, so that a resumed run goes on exactly as it would
have. To add one: a class with `name` and `next`, its line in `STRATEGIES` and in
`bench/plugins.toml`, its case in `open_strategy`; or, in another package, an entry point
`patcher.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from patcher.attempts.history import CandidateRequest, IterationResult
from patcher.bench import Registry, UsageError
from patcher.strategies.beam import Beam
from patcher.strategies.evolve import Evolve
from patcher.strategies.refine import Refine
from patcher.strategies.sample import IndependentSamples, Single

STRATEGIES = {
    "refine": "one candidate at a time: repair what is broken, then improve the best",
    "single": "one question, one candidate",
    "sample": "independent answers to one question, --width at a time",
    "beam": "the best --width designs, told apart by structure, improved side by side",
    "evolve": "islands (--islands) of designs that are varied, combined and migrate",
    "translate": "refine, beginning from a kernel that works elsewhere (--from-solution)",
}
WIDTH, ISLANDS = 4, 2
MOST_ISLANDS = 64
OF_PACKAGES: Registry[Callable[..., Strategy]] = Registry("strategies")
"""By name: ours, which `open_strategy` makes, and those of other packages, which are called with
`width`, `islands` (None where they are not said) and `seed`, and return a `Strategy`."""


class Strategy(Protocol):
    """What decides."""

    @property
    def name(self) -> str: ...

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        """What to ask together in the next round: at most `left` (at least one) candidates, whose
        parents are among those tried; () when it has nothing more to ask."""
        ...


def open_strategy(
    name: str, *, width: int | None = None, islands: int | None = None, seed: int = 0
) -> Strategy:
    """The strategy of that name.

    Args:
        width: candidates a round, for those that ask several together.
        islands: of `evolve`, which also draws from `seed`.

    Raises:
        UsageError: no such strategy, or it takes no such number.
    """
    if not OF_PACKAGES.ours(name):
        return OF_PACKAGES.load(name)(width=width, islands=islands, seed=seed)
    if width is not None and name not in ("sample", "beam", "evolve"):
        raise UsageError(f"strategy {name} asks one candidate at a time", "drop --width")
    if islands is not None and name != "evolve":
        raise UsageError(f"strategy {name} has no islands", "drop --islands, or --strategy evolve")
    count = WIDTH if width is None else width
    match name:
        case "single":
            return Single()
        case "sample":
            return IndependentSamples(count)
        case "beam":
            return Beam(count)
        case "evolve":
            return Evolve(count, ISLANDS if islands is None else islands, seed)
    return Refine(name)


__all__ = [
    "MOST_ISLANDS",
    "STRATEGIES",
    "Beam",
    "Evolve",
    "IndependentSamples",
    "Refine",
    "Single",
    "Strategy",
    "open_strategy",
]
