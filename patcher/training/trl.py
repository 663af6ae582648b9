"""TRL's trainers on the environment: rows of prompts, and a reward function (GRPO and RLOO).

    environment = KernelEnvironment(EnvironmentOptions(language=Language.TRITON))
    trainer = GRPOTrainer(
        model=...,
        args=GRPOConfig(...),
        train_dataset=Dataset.from_list(rows(environment, [task.op for task in tasks])),
        reward_funcs=reward_function(environment),
    )

`ToolEnvironment` is for `GRPOTrainer(environment_factory=...)`: several turns, by a tool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from patcher.bench import BusyError
from patcher.training import reply_judges
from patcher.training.environment import EnvironmentOptions, JudgeReply, KernelEnvironment


def rows(environment: KernelEnvironment, ops: Iterable[str]) -> list[dict[str, str]]:
    """A row for each op: `prompt`, and `op`, which the reward function needs."""
    return [{"prompt": environment.reset(op), "op": op} for op in ops]


def reward_function(environment: KernelEnvironment) -> Callable[..., list[float | None]]:
    """A reward function of TRL: the reward of each completion as the first reply of an episode.

    A completion that the machine is too busy to time, again after each of `BUSY_WAITS_S`, has none:
    TRL leaves it out of the update.
    """

    def patcher_reward(
        prompts: Sequence[Any], completions: Sequence[Any], op: Sequence[str], **_: Any
    ) -> list[float | None]:
        return [_value(environment, *each) for each in zip(completions, op, strict=True)]

    return patcher_reward


def _value(environment: KernelEnvironment, completion: Any, op: str) -> float | None:
    for wait_s in (0.0, *reply_judges.BUSY_WAITS_S):
        time.sleep(wait_s)
        environment.begin(op)
        with suppress(BusyError):
            return environment.step(completion_text(completion)).reward.value
    return None


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """A completion's text, plain or of a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class ToolEnvironment:
    """An environment of TRL's `GRPOTrainer`: the model submits kernels by a tool, and the best
    counts. Rows need the column `op`; bind the options with `functools.partial`."""

    def __init__(
        self, options: EnvironmentOptions | None = None, judge: JudgeReply | None = None
    ) -> None:
        """Make an environment.

        Args:
            options: what is asked for.
            judge: gives verdicts, for all rollouts; None: the judge that the options name.
        """
        self._environment = KernelEnvironment(options, judge)
        self._values: list[float] = []

    def reset(self, op: str, **_: Any) -> None:
        """Begin an episode; the row's prompt says the task already."""
        self._environment.begin(op)
        self._values = []

    def submit_kernel(self, source: str) -> str:
        """
        Build, check and time a kernel.

        Args:
            source: The whole source file in one fenced code block.

        Returns:
            What the judge found.
        """
        if self._environment.done:
            return "The episode has ended: no more kernels are judged."
        turn = self._environment.step(source)
        self._values.append(turn.reward.value)
        return turn.observation

    def get_reward(self) -> float:
        """The best reward of the episode; -1 if no kernel was submitted."""
        return max(self._values, default=-1.0)
