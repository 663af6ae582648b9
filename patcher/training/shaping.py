"""From a verdict to the number that a trainer maximises, with all that went into it as data.

`milestones` is CUDA Agent's scale. `log-speedup` grows with the gain, as rewards by speedup do. To
both can be added the share of GPU time that the candidate's own kernels take, which is Dr.Kernel's
`time_coverage` (hkust-nlp/KernelGYM, drkernel/kernel/rewards/reward_client.py): a candidate that
leaves the work to a library's kernels gets little of it. Lower ends of intervals count throughout.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Evaluation, Outcome, Record
from patcher.judges.reward import Reward, RewardResult

Scale = Literal["milestones", "log-speedup", "steps"]
WRONG = -1.0
_STEPS = {Outcome.COMPILATION_FAILURE: -0.75, Outcome.RUNTIME_ERROR: -0.5, Outcome.MISMATCH: -0.5}
"""Of `steps`: how far what is not right came."""


class Shaping(Record):
    """How a reward's value is made."""

    scale: Scale = "milestones"
    """Milestones: -1 wrong, 1 right, 2 faster than eager, 3 than torch.compile, too. Log-speedup:
    -1 wrong, else 1 + log2 of the speedup against the stronger of both, not below 1. Steps:
    milestones, but -0.75 for a source that does not compile and -0.5 for one that compiles and is
    wrong, for models whose replies would all get -1; what breaks a rule gets -1 there, too."""
    most: float = Field(default=3.0, gt=0)
    """Largest value of the log2."""
    share_weight: float = Field(default=0.0, ge=0)
    """Weight of the share of GPU time in the candidate's own kernels, which needs counters."""


class TurnReward(Record):
    """The reward of one reply."""

    schema_version: int = SCHEMA_VERSION
    value: float
    why: str
    shaping: Shaping
    milestone: Reward | None = None
    """CUDA Agent's scale, with the speedups; None: the reply held no source."""
    share: float | None = None
    """Of GPU time in own kernels, 0 to 1; None: not measured, and nothing is added for it."""


def shaped(judged: RewardResult, shaping: Shaping) -> TurnReward:
    """The reward of a judged candidate."""
    found = judged.reward
    if found.value < 0:
        steps = _STEPS if shaping.scale == "steps" else {}
        wrong = [each.outcome for each in judged.evaluations.values() if not each.right]
        came = min((steps.get(each, WRONG) for each in wrong), default=WRONG)
        return TurnReward(value=came, why=found.why, shaping=shaping, milestone=found)
    value = float(found.value)
    if shaping.scale == "log-speedup":
        lows = [each.geomean_low for each in found.speedups.values()]
        value = 1.0 + min(max(math.log2(min(lows)), 0.0), shaping.most) if lows else 1.0
    shares = [own_share(each) for each in judged.evaluations.values()]
    share = next((each for each in shares if each is not None), None)
    value += shaping.share_weight * (share or 0.0)
    return TurnReward(value=value, why=found.why, shaping=shaping, milestone=found, share=share)


def own_share(evaluation: Evaluation) -> float | None:
    """Share of GPU time in the candidate's own kernels; None without counters."""
    times = [
        (each.library is None, each.launches * each.duration_us)
        for each in evaluation.counters
        if each.duration_us is not None
    ]
    whole = sum(time for _, time in times)
    return sum(time for own, time in times if own) / whole if whole else None
