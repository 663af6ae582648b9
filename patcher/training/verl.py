"""The judge as verl's reward, and questions as the rows of its parquet files (version 0.9.1).

    python -m verl.trainer.main_ppo \\
        reward.custom_reward_function.path=pkg://patcher.training.verl \\
        +reward.custom_reward_function.reward_kwargs.judge=ray ...

verl has several workers for rewards. The judge of one machine is asked by one at a time; on a
cluster, `judge=ray` has one for each GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from patcher.bench import Language, Outcome
from patcher.training.environment import EnvironmentOptions, KernelEnvironment
from patcher.training.reply_judges import step_patiently
from patcher.training.shaping import Scale, Shaping

_ONE = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    language: str = Language.CUDA,
    scale: Scale = "milestones",
    judge: str = "local",
    **more: Any,
) -> dict[str, float]:
    """`score` of a reply, whether it was `right`, and whether it was `caught` breaking a rule.

    Args:
        data_source: of the row; not used.
        solution_str: the reply.
        ground_truth: the op.
        extra_info: of the row; not used.
        language: of the kernels.
        scale: see `Shaping`.
        judge: see `EnvironmentOptions`.
        more: of verl; not used.

    Raises:
        UsageError: no such op or judge.
        PatcherError: the judge cannot judge here.
    """
    environment = _environment(Language(language), scale, judge)
    with _ONE:
        environment.begin(ground_truth)
        turn = step_patiently(environment, solution_str)
    found = turn.evaluations.values()
    return {
        "score": turn.reward.value,
        "right": float(bool(found) and all(one.right for one in found)),
        "caught": float(any(one.outcome is Outcome.GUARD_VIOLATION for one in found)),
    }


@functools.cache
def _environment(language: Language, scale: Scale, judge: str) -> KernelEnvironment:
    shaping = Shaping(scale=scale)
    return KernelEnvironment(EnvironmentOptions(language, turns=1, shaping=shaping, judge=judge))


def rows(environment: KernelEnvironment, ops: Iterable[str]) -> list[dict[str, Any]]:
    """A row for each op: `Dataset.from_list(rows(environment, ops)).to_parquet("train.parquet")`.

    Raises:
        UsageError: no such op, or it has no sweep for the judge's device.
    """
    return [
        {
            "data_source": "patcher",
            "prompt": [{"role": "user", "content": environment.reset(op)}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": op},
            "extra_info": {"index": index},
        }
        for index, op in enumerate(ops)
    ]
