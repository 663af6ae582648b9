from __future__ import annotations

from dataclasses import dataclass

from bench.candidate import Candidate


@dataclass(frozen=True)
class Tripwires:
    refused: tuple[str, ...] = ()
    evidence: int = 0
    declares_nondeterminism: bool = False

    def said(self) -> tuple[str, ...]:
        return ()


def look(candidate: Candidate, on: bool) -> Tripwires:
    return Tripwires()
