"""What the analyst expected against what came: kept so that it can be told how far off it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from patcher.attempts import Attempt
from patcher.bench import Record


class Expectation(Record):
    """One recommendation, held against the next evaluation."""

    iteration: int
    change: str
    before: float | None
    """Geometric mean speedup of the candidate that was to be changed."""
    expected: float
    measured: float | None
    """Of the changed one, or of its repair; None: neither was right."""

    @property
    def off_pct(self) -> float | None:
        """How far the measured speedup was above (or below, negative) the expected one."""
        return None if self.measured is None else 100 * (self.measured / self.expected - 1)


def expectations(attempts: Sequence[Attempt]) -> list[Expectation]:
    """Every expectation that has been put to the test, in order."""
    found = []
    for attempt in attempts:
        advice = attempt.recommendation
        if advice is None or advice.expected_speedup is None:
            continue
        before = next((a for a in attempts if a.iteration in attempt.parents), None)
        found.append(
            Expectation(
                iteration=attempt.iteration,
                change=advice.change,
                before=before.geomean_speedup if before else None,
                expected=advice.expected_speedup,
                measured=_measured(attempt, attempts),
            )
        )
    return found


def verdict(found: Sequence[Expectation]) -> str:
    """How the expectations held, in a sentence or two; empty without any."""
    if not found:
        return ""
    measured = [one for one in found if one.measured is not None]
    broke = len(found) - len(measured)
    parts = [f"{broke} of {len(found)} changes never gave a right kernel." if broke else ""]
    ratios = [math.log(one.measured / one.expected) for one in measured if one.measured]
    if ratios:
        ratio = math.exp(sum(ratios) / len(ratios))
        how = "too high" if ratio < 1 else "too low"
        parts.append(
            f"On average {100 * ratio:.0f} % of the expected speedup was measured: "
            + (f"expectations are {how}." if abs(ratio - 1) >= 0.05 else "expectations hold.")
        )
    return " ".join(part for part in parts if part)


def _measured(attempt: Attempt, attempts: Sequence[Attempt]) -> float | None:
    """Its own speedup, or that of a repair of it."""
    if attempt.geomean_speedup is not None:
        return attempt.geomean_speedup
    for later in attempts:
        repairs = later.phase == "functional" and attempt.iteration in later.parents
        if repairs and later.iteration > attempt.iteration:
            return _measured(later, attempts)
    return None
