"""What a candidate is worth to training, as data: -1, 1, 2 or 3, and the measured speedups.

The scale is CUDA Agent's (BytedTsinghua-SIA/CUDA-Agent): wrong, right, over 5 % faster than eager,
over 5 % faster than `torch.compile`, too. Here only the lower ends of intervals count as faster,
so that noise is never judge_for_reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from patcher.bench import (
    SCHEMA_VERSION,
    BusyError,
    Candidate,
    Evaluation,
    MissingError,
    Outcome,
    Record,
    UsageError,
    geomean,
    load_op,
)
from patcher.bench.judge import JudgeSettings, Progress
from patcher.judges import open_judges, remote_judge
from patcher.judges.remote import UnreachableError

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


class RewardResult(Record):
    """A candidate's reward and the evaluations behind it, by baseline."""

    schema_version: int = SCHEMA_VERSION
    reward: Reward
    evaluations: dict[str, Evaluation]


def judge_for_reward(
    where: str,
    candidate: Candidate,
    settings: JudgeSettings,
    request_id: str,
    report: Progress,
    against: Sequence[str] = AGAINST,
    counters: bool = False,
) -> RewardResult:
    """Judge the candidate against each of the baselines that its op has: a whole judgement each,
    and so as many times the cost. A wrong one is judged once.

    Args:
        counters: whether right verdicts carry hardware counters, where they can be read.

    Raises:
        UsageError: the op has none of the baselines, or the language is only compiled here.
        WaitingError: the judge is remote; all jobs are written.
        BusyError: a machine is too busy to time it against one of them.
        PatcherError: as `judge.evaluate`; that torch.compile does not run here is no error.
    """
    remote = remote_judge(where)
    if remote is not None:
        names, _ = baselines_of(candidate, against)
        kind, place = remote
        with kind(place, settings, request_id, counters, report) as judge:
            for name in names:
                judge.submit(candidate, dataclasses.replace(settings, baseline=name))

            def taken(candidate: Candidate, settings: JudgeSettings) -> Evaluation:
                [found] = judge.gather([judge.submit(candidate, settings)])
                return found

            return reward_of(candidate, settings, against, taken)

    def evaluate(candidate: Candidate, settings: JudgeSettings) -> Evaluation:
        with open_judges(where, settings, request_id, report, counters=counters) as judges:
            return judges.evaluate([candidate])[0]

    return reward_of(candidate, settings, against, evaluate)


def reward_of(
    candidate: Candidate,
    settings: JudgeSettings,
    against: Sequence[str],
    evaluate: Callable[[Candidate, JudgeSettings], Evaluation],
) -> RewardResult:
    """The reward of a candidate that `evaluate` judges here, against one baseline at a time.

    Raises:
        UsageError, PatcherError: as `judge_for_reward`.
    """
    names, missing = baselines_of(candidate, against)
    found: dict[str, Evaluation] = {}
    for name in names:
        try:
            found[name] = evaluate(candidate, dataclasses.replace(settings, baseline=name))
        except MissingError as error:
            if not found or isinstance(error, BusyError | UnreachableError):
                raise
            missing[name] = error.message
        else:
            if not found[name].right:
                break
    return RewardResult(reward=reward(list(found.values()), missing, against), evaluations=found)


def baselines_of(candidate: Candidate, against: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Which of the baselines the candidate's op has, and why it lacks the others.

    Raises:
        UsageError: it has none, or the language is only compiled here.
    """
    op = load_op(candidate.op)
    if candidate.language.compile_only:
        raise UsageError(
            f"a {candidate.language} kernel is only compiled here: it has no reward",
            "evaluate it without --reward",
        )
    names = [name for name in against if name in op.baselines]
    if not names:
        raise UsageError(
            f"{op.name} has no baseline of {', '.join(against)}", "add one to its baselines.py"
        )
    missing = {
        name: f"{op.name} has no such baseline" for name in against if name not in op.baselines
    }
    return names, missing


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
        than = f"not over {FASTER_PCT:g} % faster than" if not level else "not than"
        said += f", {than} {against[level]}{low}"
    return said
