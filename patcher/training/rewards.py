"""What a verdict is worth to a trainer, as data.

Two scales ship. `milestones` is CUDA Agent's (arXiv 2602.24286): -1 wrong, 1 right, 2 over 5 %
faster than eager, 3 over 5 % faster than `torch.compile`, too. `log-speedup` pays the logarithm of
the speedup, as the trainers do that want more than three levels. Only the lower ends of intervals
count, so that noise is never paid for.
"""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import Field, ValidationError

from patcher.bench import Candidate, Outcome, Record, UsageError, content, first_error, geomean
from patcher.bench.judge import JudgeSettings
from patcher.judges import LOCAL, open_judges
from patcher.judges.reward import AGAINST, RewardResult, judge_for_reward, reward


class RewardScheme(Record):
    """Of one kernel. A level is paid only with those below it."""

    unreadable: float = -1.0
    """A reply that holds no kernel."""
    wrong: float = -1.0
    """What does not compile, run, or give the right values."""
    caught: float = -1.0
    """What broke the judge's rules: tricks, and writes out of bounds."""
    right: float = 1.0
    faster: tuple[float, ...] = Field(default=(), max_length=len(AGAINST))
    """In place of `right` where it is faster than eager, and than torch.compile, too."""
    log: float = 0.0
    """Times the natural logarithm of the speedup over the op's strongest baseline, added."""
    least_log: float = Field(default=-1.0, le=0)
    most_log: float = Field(default=3.0, ge=0)
    share: float = Field(default=1.0, gt=0, le=1)
    """The op's part of the served model's time: the logarithm is of the gain of the whole model."""

    @property
    def against(self) -> tuple[str, ...]:
        """The baselines that a kernel is judged against: one judgement each; empty: the op's
        strongest.
        """
        return AGAINST[: len(self.faster)]

    def value(self, found: RewardResult) -> float:
        """The reward of one judged kernel."""
        last = list(found.evaluations.values())[-1]
        if last.outcome is Outcome.GUARD_VIOLATION:
            return self.caught
        if found.reward.value < 0:
            return self.wrong
        level = found.reward.value - 1
        paid = (self.right, *self.faster)[min(level, len(self.faster))]
        if self.log and last.timings:
            low = geomean([one.speedup_low for one in last.timings])
            gain = -math.log1p(self.share * (1 / low - 1))
            paid += self.log * min(max(gain, self.least_log), self.most_log)
        return paid


MILESTONES = RewardScheme(faster=(2.0, 3.0))
LOG_SPEEDUP = RewardScheme(right=0.5, log=1.0)
SCHEMES = {"milestones": MILESTONES, "log-speedup": LOG_SPEEDUP}


def reward_scheme(spec: str | Path) -> RewardScheme:
    """The scheme of that name, or of a JSON file.

    Raises:
        UsageError: there is none.
    """
    if str(spec) in SCHEMES:
        return SCHEMES[str(spec)]
    path = Path(spec)
    if not path.is_file():
        raise UsageError(
            f"no reward scheme {spec}", f"say {' or '.join(SCHEMES)}, or give a JSON file"
        )
    try:
        return RewardScheme.model_validate_json(content(path))
    except ValidationError as error:
        field, wrong, _ = first_error(error)
        where = ".".join(map(str, field)) or "the file"
        raise UsageError(
            f"{path} is no reward scheme: {where}: {wrong}", "see patcher.training.RewardScheme"
        ) from error


def judged(
    candidate: Candidate,
    scheme: RewardScheme,
    settings: JudgeSettings,
    where: str = LOCAL,
    request_id: str = "training",
) -> RewardResult:
    """The verdicts on a kernel that the scheme needs.

    Args:
        where: as `--judge` names it.
        request_id: who asks; on a remote judge the same kernel is judged once for it.

    Raises:
        WaitingError: the judge is remote, and its verdict has not come.
        PatcherError: as `patcher.bench.judge.evaluate`.
    """
    if scheme.against:
        return judge_for_reward(
            where, candidate, settings, request_id, lambda *_: None, scheme.against
        )
    with open_judges(where, settings, request_id, lambda *_: None) as judges:
        [found] = judges.evaluate([candidate])
    name = found.baseline or "none"
    return RewardResult(reward=reward([found], against=()), evaluations={name: found})
