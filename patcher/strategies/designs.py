"""Designs among the attempts: the best of each structure, and the repairs that are due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from patcher.attempts.history import CandidateRequest, IterationResult, rounds
from patcher.attempts.structure import APART, Structure, structure


def designs(tried: Iterable[IterationResult], most: int) -> list[IterationResult]:
    """The best right candidates that differ in structure, best first; of one design only the
    best."""
    chosen: list[tuple[IterationResult, Structure]] = []
    ranked = sorted(
        (one for one in tried if one.right), key=lambda one: one.rank, reverse=True
    )  # stable: of equals the first
    for one in ranked:
        if len(chosen) == most:
            break
        assert one.candidate is not None
        own = structure(one.candidate)
        if all(own.distance(other) >= APART for _, other in chosen):
            chosen.append((one, own))
    return [one for one, _ in chosen]


def pending_repairs(tried: Sequence[IterationResult]) -> list[CandidateRequest]:
    """One repair for each candidate of the last round that broke, and one more try for each reply
    that held none; what was repaired once is left."""
    if not tried:
        return []
    asks = []
    for one in rounds(tried)[-1]:
        ask = one.ask
        if one.candidate is None and ask.after is None:
            asks.append(ask.model_copy(update={"after": one.iteration}))
        elif one.candidate is not None and not one.right and ask.kind != "repair":
            asks.append(
                CandidateRequest(kind="repair", parents=(one.iteration,), island=ask.island)
            )
    return asks


def fruitless(parent: IterationResult, tried: Iterable[IterationResult]) -> int:
    """How many candidates were made of this one since one of them was better than it."""
    count = 0
    for one in tried:
        if one.ask.phase == "optimisation" and parent.iteration in one.ask.parents:
            count = 0 if one.right and one.rank > parent.rank else count + 1
    return count
