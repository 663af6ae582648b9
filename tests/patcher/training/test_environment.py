"""The environment of trainers: prompts, observations and rewards, by the real judge on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from training_sample import OP, OPTIONS, RIGHT, WRONG, evaluation, judged, reply

from patcher.bench import (
    BusyError,
    Candidate,
    MissingError,
    Outcome,
    UsageError,
)
from patcher.judges.reward import RewardResult
from patcher.training import KernelEnvironment, Shaping
from patcher.training.shaping import own_share, shaped
from patcher.training.trl import ToolEnvironment, reward_function, rows


@pytest.mark.parametrize(
    ("lows", "milestone", "by_log"),
    [((4.0, 2.0), 3.0, 2.0), ((4.0, 0.5), 2.0, 1.0), ((0.5, 0.5), 1.0, 1.0), ((99, 99), 3.0, 4.0)],
)
def test_scales(lows: tuple[float, float], milestone: float, by_log: float) -> None:
    result = judged(evaluation("eager", lows[0]), evaluation("torch.compile", lows[1]))
    assert shaped(result, Shaping()).value == milestone
    assert shaped(result, Shaping(scale="log-speedup")).value == pytest.approx(by_log)


@pytest.mark.parametrize(
    ("outcome", "by_steps"),
    [
        (Outcome.COMPILATION_FAILURE, -0.75),
        (Outcome.RUNTIME_ERROR, -0.5),
        (Outcome.MISMATCH, -0.5),
        (Outcome.GUARD_VIOLATION, -1.0),
    ],
)
def test_steps_tell_how_far_a_wrong_candidate_came(outcome: Outcome, by_steps: float) -> None:
    right = evaluation("torch.compile", 2.0)
    failed = evaluation("eager", 2.0).model_copy(update={"outcome": outcome})
    for result in (judged(failed), judged(failed, right)):
        assert shaped(result, Shaping(scale="steps")).value == by_steps
        assert shaped(result, Shaping()).value == -1.0
    assert shaped(judged(right), Shaping(scale="steps")).value == 1.0


def test_the_share_of_own_kernels_counts_where_it_was_measured() -> None:
    both = evaluation("eager", 2.0, (True, 30.0), (False, 10.0))
    assert own_share(both) == pytest.approx(0.75)
    found = shaped(judged(both), Shaping(share_weight=0.5))
    assert (found.value, found.share) == (pytest.approx(2.375), pytest.approx(0.75))
    unknown = shaped(judged(evaluation("eager", 2.0)), Shaping(share_weight=0.5))
    assert (unknown.value, unknown.share) == (2.0, None)


@pytest.fixture(scope="module")
def environment() -> KernelEnvironment:
    return KernelEnvironment(OPTIONS)


@pytest.mark.slow
def test_an_episode(environment: KernelEnvironment) -> None:
    prompt = environment.reset(OP)
    assert "def silu_and_mul(" in prompt
    nothing = environment.step("I cannot.")
    assert nothing.failure is not None
    assert (nothing.reward.value, nothing.reward.milestone, nothing.done) == (-1.0, None, False)
    wrong = environment.step(reply(WRONG))
    assert wrong.reward.value == -1.0
    assert wrong.reward.why.startswith("mismatch")
    assert "Failed check" in wrong.observation
    right = environment.step(reply(RIGHT))
    assert right.reward.value >= 1.0, right.observation
    assert right.done
    assert "Against `eager`" in right.observation
    with pytest.raises(UsageError, match="has ended"):
        environment.step(reply(RIGHT))


def test_a_source_is_judged_once() -> None:
    seen: list[str] = []

    def judge(candidate: Candidate, _: Any) -> RewardResult:
        seen.append(candidate.digest)
        return judged(evaluation("eager", 2.0))

    environment = KernelEnvironment(OPTIONS, judge)
    function = reward_function(environment)
    asked = rows(environment, [OP])
    assert asked[0]["op"] == OP
    conversation = [{"role": "assistant", "content": reply(RIGHT)}]
    values = function(
        prompts=["", "", ""], completions=[reply(RIGHT), conversation, "none"], op=[OP] * 3
    )
    assert values == [2.0, 2.0, -1.0]
    assert len(seen) == 1


def test_what_a_busy_machine_cannot_time_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patcher.training.reply_judges.BUSY_WAITS_S", (0.0, 0.0))
    busy: list[MissingError] = [BusyError("this machine is too busy")] * 4

    def judge(*_: Any) -> RewardResult:
        if busy:
            raise busy.pop()
        return judged(evaluation("eager", 2.0))

    function = reward_function(KernelEnvironment(OPTIONS, judge))
    values = function(prompts=["", ""], completions=[reply(RIGHT), reply(RIGHT)], op=[OP] * 2)
    assert values == [None, 2.0]
    tools = ToolEnvironment(OPTIONS, judge)
    for error in (BusyError("too busy"), MissingError("no compiler")):
        busy += [error] * 3
        tools.reset(op=OP)
        with pytest.raises(MissingError):  # TRL tells the model of it, and goes on
            tools.submit_kernel(reply(RIGHT))
        busy.clear()
        if isinstance(error, BusyError):
            assert tools.get_reward() is None
    with pytest.raises(MissingError, match="no compiler"):
        tools.get_reward()


CHEAT = """import torch

done = {}


def silu_and_mul(gate, up, output):
    if gate.shape not in done:
        done[gate.shape] = torch.nn.functional.silu(gate.float()).mul_(up.float())
    output.copy_(done[gate.shape])
"""


def test_a_kernel_that_replays_its_first_answer_is_wrong(environment: KernelEnvironment) -> None:
    environment.reset(OP)
    turn = environment.step(reply(CHEAT))
    assert (turn.reward.value, turn.reward.why) == (-1.0, "mismatch: values")


def test_the_best_of_a_tools_kernels_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([judged(evaluation("eager", 2.0)), judged(evaluation("eager", 0.5))])
    tools = partial(ToolEnvironment, OPTIONS)()
    monkeypatch.setattr(tools, "_environment", KernelEnvironment(OPTIONS, lambda *_: next(values)))
    tools.reset(op=OP, prompt="")
    assert tools.get_reward() == -1.0
    tools.submit_kernel(reply(RIGHT))
    tools.submit_kernel(reply(WRONG))
    tools.submit_kernel("none")
    assert "ended" in tools.submit_kernel(reply(RIGHT))
    assert tools.get_reward() == 2.0
