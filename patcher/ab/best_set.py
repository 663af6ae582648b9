"""Find the best set of several patches from measurements of each alone and together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Comparison, Record, UsageError
from patcher.bench.stats.compare import holm


class Combination(Record):
    """Several patches together, compared with the unpatched baseline."""

    patches: tuple[str, ...] = Field(min_length=1)
    comparison: Comparison


class BestSet(Record):
    """Which patches to keep, and why."""

    schema_version: int = SCHEMA_VERSION
    patches: tuple[str, ...]
    """Ids of the chosen patches, sorted; empty if no set is accepted."""
    reason: str
    combinations: tuple[Combination, ...]
    """The comparisons, with verdicts corrected for all of them (Holm)."""
    missing: tuple[str, ...] = ()
    """Combinations that were not measured, so that another set may be better."""


def best_set(combinations: Sequence[Combination], confidence_pct: float = 95.0) -> BestSet:
    """Choose the set with the largest gain, or a smaller part of it that is equally good.

    Gains are never added: a set is judged only by its own comparison. If the intervals allow that a
    set and a part of it have the same gain, the part is chosen, so every patch in the result
    contributes. The largest of several gains is biased upwards, so measure the chosen set again.

    Raises:
        UsageError: there are no comparisons, a patch or set occurs twice, or a p-value is missing.
    """
    if not combinations:
        raise UsageError("no measured combination", "measure each patch alone, and all together")
    sets = [frozenset(one.patches) for one in combinations]
    if any(len(one.patches) != len(own) for one, own in zip(combinations, sets, strict=True)):
        raise UsageError("a combination names a patch twice", "name each once")
    if len(set(sets)) != len(sets):
        raise UsageError("a combination was given twice", "give one comparison of each set")
    corrected = holm([one.comparison for one in combinations], confidence_pct)
    judged = {
        own: one.model_copy(update={"comparison": found})
        for own, one, found in zip(sets, combinations, corrected, strict=True)
    }
    accepted = [own for own in sets if judged[own].comparison.verdict == "accept"]
    chosen, reason = _choose(judged, accepted)
    return BestSet(
        patches=tuple(sorted(chosen)),
        reason=reason,
        combinations=tuple(judged.values()),
        missing=tuple(_missing(sets, accepted)),
    )


def _choose(
    judged: dict[frozenset[str], Combination], accepted: list[frozenset[str]]
) -> tuple[frozenset[str], str]:
    if not accepted:
        return (
            frozenset(),
            f"none of {len(judged)} combinations is accepted after Holm's correction",
        )
    largest = max(accepted, key=lambda own: judged[own].comparison.gain_pct)
    chosen = min(
        (own for own in accepted if own <= largest and _as_good(judged[own], judged[largest])),
        key=lambda own: (len(own), -judged[own].comparison.gain_pct),
    )
    gain = judged[chosen].comparison.figures
    if chosen == largest:
        return (
            chosen,
            f"keep {_named(chosen)}: {gain}, the largest gain of {len(judged)} combinations",
        )
    rest = _named(largest - chosen)
    return chosen, (
        f"keep {_named(chosen)}: {gain}; with {rest} it is {judged[largest].comparison.figures}, "
        "which the intervals do not tell apart"
    )


def _as_good(part: Combination, whole: Combination) -> bool:
    """Whether the intervals allow that a part has the same gain as the whole."""
    first, second = part.comparison, whole.comparison
    half = math.hypot(first.gain_high_pct - first.gain_pct, second.gain_pct - second.gain_low_pct)
    return second.gain_pct - first.gain_pct <= half


def _missing(sets: list[frozenset[str]], accepted: list[frozenset[str]]) -> list[str]:
    every = sorted(frozenset[str]().union(*sets))
    found = [f"{name} alone" for name in every if frozenset({name}) not in sets]
    good = sorted(name for name in every if frozenset({name}) in accepted)
    if len(good) > 1 and frozenset(good) not in sets:
        found.append(f"{_named(frozenset(good))} together, each accepted alone")
    return found


def _named(patches: frozenset[str]) -> str:
    return " + ".join(sorted(patches))
