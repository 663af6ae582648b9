"""What a candidate is worth to training, as data: -1, 1, 2 or 3, and the measured speedups.

The scale is CUDA Agent's (BytedTsinghua-SIA/CUDA-Agent): wrong, right, over 5 % faster than eager,
over 5 % faster than `torch.compile`, too. Here only the lower ends of intervals count as faster,
so that noise is never rewarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Evaluation, Outcome, Record, geomean

AGAINST = ("eager", "torch.compile")
"""The baselines of an op that the scale names, in its order."""
FASTER_PCT = 5.0


class Speedup(Record):
    """Against one baseline, over the points of the sweep."""

    geomean: float
    geomean_low: float
    """Geometric mean of the lower ends of the points' 95 % intervals."""
    faster: bool
    """Whether the lower end is over `FASTER_PCT`."""


class Reward(Record):
    """Of one candidate."""

    schema_version: int = SCHEMA_VERSION
    op: str
    digest: str
    """Of the candidate."""
    value: Literal[-1, 1, 2, 3]
    why: str
    speedups: dict[str, Speedup] = Field(default_factory=dict)
    """By baseline."""
    missing: dict[str, str] = Field(default_factory=dict)
    """Baselines that it could not be held against, and why: what they would give cannot be won."""


def reward(
    evaluations: Sequence[Evaluation],
    missing: Mapping[str, str] | None = None,
    against: Sequence[str] = AGAINST,
) -> Reward:
    """The reward that these evaluations of one candidate give; a level counts only with those
    below it.

    Args:
        evaluations: at least one; those against a baseline in `against` say whether it is faster.
        missing: baselines that do not run, and why.
        against: eager and compile, in this order; empty: whether it is right, and no more.

    Raises:
        ValueError: none, of different candidates, two against one baseline, or only compiled.
    """
    if len({(each.op, each.digest) for each in evaluations}) != 1:
        raise ValueError("a reward is of one candidate")
    if any(each.outcome is Outcome.COMPILED for each in evaluations):
        raise ValueError("what was only compiled is neither right nor wrong")
    first = evaluations[0]
    wrong = [each for each in evaluations if not each.right]
    if wrong:
        failed = wrong[0].failed_checks
        why = f"{wrong[0].outcome}: {failed[0].name}" if failed else str(wrong[0].outcome)
        return Reward(op=first.op, digest=first.digest, value=-1, why=why)
    named = [each for each in evaluations if each.baseline in against]
    speedups = {str(each.baseline): _speedup(each) for each in named}
    if len(speedups) != len(named):
        raise ValueError("two evaluations against one baseline")
    unknown = {name: "not judged" for name in against if name not in speedups}
    level = 0
    while level < len(against) and (found := speedups.get(against[level])) and found.faster:
        level += 1
    values: tuple[Literal[1], Literal[2], Literal[3]] = (1, 2, 3)
    return Reward(
        op=first.op,
        digest=first.digest,
        value=values[level],
        why=_why(level, against, speedups),
        speedups=speedups,
        missing={**unknown, **(missing or {})},
    )


def _speedup(evaluation: Evaluation) -> Speedup:
    low = geomean([timing.speedup_low for timing in evaluation.timings])
    return Speedup(
        geomean=geomean([timing.speedup for timing in evaluation.timings]),
        geomean_low=low,
        faster=low > 1 + FASTER_PCT / 100,
    )


def _why(level: int, against: Sequence[str], speedups: Mapping[str, Speedup]) -> str:
    said = "right"
    if level:
        said += f", over {FASTER_PCT:g} % faster than {' and '.join(against[:level])}"
    if level < len(against):
        found = speedups.get(against[level])
        low = f" (lower end {found.geomean_low:.3f}x)" if found else " (not judged)"
        said += f", not than {against[level]}{low}"
    return said
