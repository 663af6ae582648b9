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

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from patcher.bench import BusyError, PatcherError
from patcher.training.environment import EnvironmentOptions, JudgeReply, KernelEnvironment
from patcher.training.reply_judges import step_patiently


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
    environment.begin(op)
    with suppress(BusyError):
        return step_patiently(environment, completion_text(completion)).reward.value
    return None


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """A completion's text, plain or of a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


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
        self._error: PatcherError | None = None

    def reset(self, op: str, **_: Any) -> None:
        """Begin an episode; the row's prompt says the task already."""
        self._environment.begin(op)
        self._values, self._error = [], None

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
        try:
            turn = step_patiently(self._environment, source)
        except PatcherError as error:
            self._error = error  # TRL tells the model alone, and goes on
            raise
        self._values.append(turn.reward.value)
        return turn.observation

    def get_reward(self) -> float | None:
        """The best reward of the episode; -1 without a kernel; None if a machine was too busy.

        Raises:
            PatcherError: the judge could not judge.
        """
        if self._error is not None:
            if isinstance(self._error, BusyError):
                return None
            raise self._error
        return max(self._values, default=-1.0)
