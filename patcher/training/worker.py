"""`python -P -m patcher.training.worker`: judges replies, its judges open from one to the next."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from patcher.bench import Candidate, Evaluation, PatcherError, Record
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.judges import LOCAL
from patcher.judges.counters import CandidateJudge, with_counters
from patcher.judges.reward import RewardResult, reward_of
from patcher.tasks.pool import JobFunction, serve_jobs
from patcher.training.environment import (
    OPTIONS,
    EnvironmentOptions,
    JudgeReply,
    KernelEnvironment,
)
from patcher.training.replies import JudgedReply, judged_reply


class WorkerVerdict(Record):
    """A judged reply, or the error that kept the judge from it."""

    judged: JudgedReply | None = None
    error: dict[str, str] | None = None


class OpenJudges:
    """Local judges, each kept open for what is judged with the same settings; a context manager.

    Args:
        options: of the environment: baselines and counters.
    """

    def __init__(self, options: EnvironmentOptions) -> None:
        self._options = options
        self._stack = ExitStack()
        self._judges: dict[JudgeSettings, Any] = {}

    def __enter__(self) -> OpenJudges:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __call__(self, candidate: Candidate, settings: JudgeSettings) -> RewardResult:
        """As `patcher.judges.reward.judge_for_reward`."""
        return reward_of(candidate, settings, self._options.against, self._evaluate)

    def _evaluate(self, candidate: Candidate, settings: JudgeSettings) -> Evaluation:
        if settings not in self._judges:
            self._judges[settings] = self._stack.enter_context(open_judge(settings))
        one: CandidateJudge = partial(self._judges[settings].evaluate, report=lambda *_: None)
        if self._options.counters:
            one = with_counters(one, settings.sweep, lambda _: None)
        return one(candidate)


class ReplyWorker:
    """Judges replies; the environment is made again when the options change."""

    def __init__(self) -> None:
        self._options: EnvironmentOptions | None = None
        self._stack = ExitStack()
        self._environment: KernelEnvironment | None = None

    def judge(self, options: dict[str, Any], op: str, reply: str) -> WorkerVerdict:
        """The verdict on a reply as the only one of an episode."""
        try:
            environment = self._with(OPTIONS.validate_python(options))
            environment.begin(op)
            return WorkerVerdict(judged=judged_reply(environment.step(reply)))
        except PatcherError as error:
            return WorkerVerdict(error=error.as_dict())

    def _with(self, options: EnvironmentOptions) -> KernelEnvironment:
        if self._environment is None or options != self._options:
            self._stack.close()
            judge: JudgeReply | None = None
            if options.judge == LOCAL:
                judge = self._stack.enter_context(OpenJudges(options))
            self._environment, self._options = KernelEnvironment(options, judge), options
        return self._environment


def load() -> Mapping[str, JobFunction]:
    return {"judge": ReplyWorker().judge}


if __name__ == "__main__":
    serve_jobs(load)
