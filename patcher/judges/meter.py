"""A judgement as a step of the run: once, ever, within the ceilings on time."""

from __future__ import annotations

from collections.abc import Callable

from patcher.bench import Evaluation
from patcher.models.budget import Budget, time_is_up
from patcher.models.ceilings import Amount, Resource
from patcher.models.retry import Clock, TimeUp

JUDGE_LIMIT_S = 1200.0
"""The longest that one judgement may take, where there is a ceiling on time or GPU time."""


class JudgeMeter:
    """Charges judgements to the budget of a run.

    Args:
        on_gpu: whether a judgement takes GPU time: all of the step, a wait for the GPU's lock
            included.
        clock: a test gives its own.
    """

    def __init__(self, budget: Budget, *, on_gpu: bool = False, clock: Clock | None = None) -> None:
        self._budget = budget
        self._on_gpu = on_gpu
        self._clock = clock or Clock()

    def judge(self, step: str, function: Callable[[], Evaluation]) -> Evaluation:
        """The evaluation of a step: stored, or made now by calling `function` once.

        Raises:
            BudgetError: no time is left for it, or it was stopped at a ceiling.
        """
        took_s: float | None = None

        def timed() -> Evaluation:
            nonlocal took_s
            evaluation, took_s = self._timed(step, function)
            return evaluation

        evaluation = self._budget.run.step(step, timed, Evaluation)
        if took_s is not None:
            # only a remote judge knows how long it took
            gpu_s = max(took_s, evaluation.total_s or 0.0) if self._on_gpu else 0.0
            self._budget.spend(step, Amount(wall_s=took_s, gpu_s=gpu_s))
        elif (reserved := self._budget.reserved(step)) is not None:
            self._budget.spend(step, reserved)
        return evaluation

    def _timed(self, step: str, function: Callable[[], Evaluation]) -> tuple[Evaluation, float]:
        clocks: tuple[Resource, ...] = ("wall_s", "gpu_s") if self._on_gpu else ("wall_s",)
        limit = self._budget.time_limit("a judgement", JUDGE_LIMIT_S, clocks)
        self._budget.reserve(step, Amount.model_validate(dict.fromkeys(clocks, limit or 0.0)))
        begun_s = self._clock.now()
        try:
            with self._clock.alarm(limit):
                evaluation = function()
        except BaseException as error:
            took_s = self._clock.now() - begun_s
            self._budget.spend(step, Amount.model_validate(dict.fromkeys(clocks, took_s)))
            if isinstance(error, TimeUp):
                raise time_is_up("the judgement", limit) from None
            raise
        return evaluation, self._clock.now() - begun_s
