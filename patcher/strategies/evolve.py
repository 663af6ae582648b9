"""Evolution with islands: populations that grow apart and now and then send each other their
best.

Every draw comes from the seed, which the run records, and the number of the candidate: a resumed
run draws the same. What was drawn is kept with the round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from patcher.attempts.history import CandidateRequest, IterationResult, best_of, rounds
from patcher.strategies.designs import designs, pending_repairs

POPULATION = 6
"""Designs that live on an island: the best of each structure."""
MIGRATION = 3
"""Rounds between migrations: each island's best goes to the next one."""
NEW, COMBINED = 0.15, 0.45
"""Shares of children that begin anew, and that are made of two parents; the others improve
one."""


class Evolve:
    """`width` children a round, over the islands in turn."""

    name = "evolve"

    def __init__(self, width: int, islands: int, seed: int) -> None:
        self.width = width
        self.islands = islands
        self.seed = seed

    def next(self, tried: Sequence[IterationResult], left: int) -> tuple[CandidateRequest, ...]:
        count = min(self.width, left)
        asks = pending_repairs(tried)[:count]
        populations = [designs(each, POPULATION) for each in self.residents(tried)]
        for child in range(len(tried) + len(asks), len(tried) + count):
            island = child % self.islands
            asks.append(self._child(child, island, populations[island]))
        return tuple(asks)

    def residents(self, tried: Sequence[IterationResult]) -> list[list[IterationResult]]:
        """Who was born on each island or came to it, in order."""
        homes: list[list[IterationResult]] = [[] for _ in range(self.islands)]
        for number, group in enumerate(rounds(tried), 1):
            for one in group:
                homes[(one.ask.island or 0) % self.islands].append(one)
            if number % MIGRATION == 0:
                bests = [best_of(home) for home in homes]
                for island, home in enumerate(homes):
                    guest = bests[island - 1]
                    if guest is not None and guest not in home:
                        home.append(guest)
        return homes

    def _child(
        self, child: int, island: int, population: list[IterationResult]
    ) -> CandidateRequest:
        draw = random.Random(f"{self.seed}/{child}")
        known = tuple(one.iteration for one in population)
        if not population:
            return CandidateRequest(
                kind="generate", draw=child, island=island, why=f"island {island} is empty"
            )
        share = draw.random()
        if share < NEW:
            why = f"island {island}: a new design"
            return CandidateRequest(
                kind="generate", unlike=known, draw=child, island=island, why=why
            )
        if share < NEW + COMBINED and len(population) > 1:
            pair = draw.sample(population, 2)
            parents = tuple(one.iteration for one in sorted(pair, key=_rank, reverse=True))
            why = f"island {island}: two of {list(known)}"
            return CandidateRequest(kind="combine", parents=parents, island=island, why=why)
        drawn = draw.sample(population, min(2, len(population)))
        chosen = max(drawn, key=_rank)
        why = f"island {island}: the better of {[one.iteration for one in drawn]}"
        return CandidateRequest(
            kind="optimise", parents=(chosen.iteration,), island=island, why=why
        )


def _rank(one: IterationResult) -> tuple[bool, float]:
    return one.rank
