"""The judge as verl's reward, and questions as the rows of its parquet files (version 0.9.1).

    python -m verl.trainer.main_ppo \\
        reward.custom_reward_function.path=pkg://patcher.training.verl \\
        +reward.custom_reward_function.reward_kwargs.where=ray ...

verl has several workers for rewards. A judge of this machine is asked by one at a time; with a
cluster, `where=ray` has a judge for each GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from patcher.bench import Language
from patcher.judges import LOCAL
from patcher.training.rewards import reward_scheme
from patcher.training.trainers import RewardFunction, questions


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    language: str = Language.CPP,
    scheme: str = "milestones",
    where: str = LOCAL,
    **more: Any,
) -> dict[str, float]:
    """`score` of a reply, whether it was `right`, and whether it was `caught` at a trick.

    Args:
        data_source: of the row; not used.
        solution_str: the reply.
        ground_truth: the op.
        extra_info: of the row; not used.
        language: of the kernels.
        scheme: a name or a JSON file, as `reward_scheme` takes it.
        where: who judges, as `--judge` names it.
        more: of verl; not used.

    Raises:
        UsageError: no such scheme, op or judge.
        PatcherError: the judge cannot judge here.
    """
    one = _function(Language(language), scheme, where).judge(solution_str, ground_truth)
    return {
        "score": one.reward,
        "right": float(one.outcome in ("correct", "too_slow")),
        "caught": float(one.outcome == "guard_violation"),
    }


@functools.cache
def _function(language: Language, scheme: str, where: str) -> RewardFunction:
    return RewardFunction(language, scheme=reward_scheme(scheme), where=where)


def rows(
    ops: Sequence[str], language: Language = Language.CPP, where: str = LOCAL
) -> list[dict[str, Any]]:
    """A row for each op: `Dataset.from_list(rows(ops)).to_parquet("train.parquet")`.

    Raises:
        MissingError: this machine has no device for the language.
    """
    return [
        {
            "data_source": "patcher",
            "prompt": row["prompt"],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": row["op"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(questions(ops, language, where))
    ]
