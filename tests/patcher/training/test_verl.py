"""verl is too large to be installed here: these are the calls of its `naive` reward manager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from training_sample import OP, OPTIONS, RIGHT, evaluation, judged, reply

from patcher.bench import Candidate, Check, Language, Outcome
from patcher.bench.judge import JudgeSettings
from patcher.judges.reward import RewardResult
from patcher.training import KernelEnvironment, verl


def verdict(candidate: Candidate, settings: JudgeSettings) -> RewardResult:
    found = evaluation("eager", 2.0)
    if "trick" in candidate.source:
        found = found.model_copy(
            update={
                "outcome": Outcome.GUARD_VIOLATION,
                "checks": (Check(name="inputs", passed=False, detail="written"),),
                "timings": (),
                "geomean_speedup": None,
            }
        )
    return judged(found)


def test_a_reply_has_a_score_and_says_whether_it_was_a_trick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    environment = KernelEnvironment(replace(OPTIONS, turns=1), verdict)

    def made(*given: Any) -> KernelEnvironment:
        asked.append(given)
        return environment

    monkeypatch.setattr(verl, "_environment", made)
    [row] = verl.rows(environment, [OP])
    assert OP in row["prompt"][0]["content"]
    known = {
        "data_source": row["data_source"],
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": {**row["extra_info"], "num_turns": None},
        "reward_router_address": None,
        "language": "torch",
    }
    replies = (reply(RIGHT), reply(RIGHT + "# trick\n"), "nothing")
    found = [verl.compute_score(solution_str=one, **known) for one in replies]
    assert found == [
        {"score": 2.0, "right": 1.0, "caught": 0.0},
        {"score": -1.0, "right": 0.0, "caught": 1.0},
        {"score": -1.0, "right": 0.0, "caught": 0.0},
    ]
    assert asked == [(Language.TORCH, "milestones", "local")] * 3


def test_an_environment_is_of_the_language_scale_and_judge_that_verl_names() -> None:
    made = verl._environment(Language.CPP, "log-speedup", "local").options
    assert (made.language, made.shaping.scale, made.judge) == ("cpp", "log-speedup", "local")
    assert made.turns == 1
