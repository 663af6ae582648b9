"""From one ask to a candidate's source: perhaps advice, then the question, then what the reply
holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from patcher.agent.advice import Advice, diagnosed, recommended
from patcher.agent.asking import Asking
from patcher.attempts import Attempt, Phase, ReplyFailure, Stage
from patcher.attempts.history import Ask, Tried
from patcher.bench import Evaluation
from patcher.models import Reply, Role
from patcher.prompting.extract import extract_source, unusable
from patcher.prompting.rendering import Prompts

Extra = Callable[[Role, int], str]
"""Text for the question of this role in this iteration: memory, a user's own sources."""
Tell = Callable[[int, Stage, Phase], None]


@dataclass(frozen=True)
class WrittenCandidate:
    """One iteration whose reply has come."""

    iteration: int
    ask: Ask
    advice: Advice
    reply: Reply
    source: str | ReplyFailure


class Writing:
    """The agents at work for one ask at a time.

    Attributes:
        tried, attempts: all iterations so far; the loop adds to them.
    """

    def __init__(self, prompts: Prompts, ask: Asking, extra: Extra | None, tell: Tell) -> None:
        self.tried: list[Tried] = []
        self.attempts: list[Attempt] = []
        self._prompts = prompts
        self._ask = ask
        self._extra = extra
        self._tell = tell

    def __call__(self, iteration: int, ask: Ask) -> WrittenCandidate:
        """The reply to this ask.

        Raises:
            BudgetError, WaitingError, ModelError, MissingError: it has not come.
        """
        advice = self._advice(iteration, ask)
        self._tell(iteration, "generate", ask.phase)
        reply = self._ask(iteration, "generate", self._question(iteration, ask, advice))
        prompts = self._prompts
        source = unusable(reply) or extract_source(reply.text, prompts.language, prompts.op.name)
        return WrittenCandidate(iteration, ask, advice, reply, source)

    def _advice(self, iteration: int, ask: Ask) -> Advice:
        if ask.kind == "optimise":
            self._tell(iteration, "analyse", ask.phase)
            source, evaluation = self._parent(ask.parents[0])
            extra = self._more("analyse", iteration)
            prompt = self._prompts.analyse(
                source, evaluation, self.attempts, pictures=self._ask.pictures, extra=extra
            )
            return recommended(self._ask, iteration, prompt)
        if ask.kind == "repair":
            self._tell(iteration, "diagnose", ask.phase)
            extra = self._more("diagnose", iteration)
            prompt = self._prompts.diagnose(*self._parent(ask.parents[0]), extra=extra)
            return diagnosed(self._ask, iteration, prompt)
        return Advice()

    def _question(self, iteration: int, ask: Ask, advice: Advice) -> str:
        failure = self.tried[ask.after].failure if ask.after is not None else None
        parents = [self._parent(parent) for parent in ask.parents]
        history: Sequence[Attempt] = self.attempts
        prompts, extra = self._prompts, self._more("generate", iteration)
        match ask.kind:
            case "generate":
                known = [(self.attempts[at], self._parent(at)[0]) for at in ask.unlike]
                return prompts.generate(failure, draw=ask.draw, unlike=known, extra=extra)
            case "repair":
                diagnosis = advice.diagnosis
                return prompts.repair(*parents[0], failure, diagnosis=diagnosis, extra=extra)
            case "optimise":
                said = advice.recommendation
                return prompts.optimise(*parents[0], said, history, failure, extra=extra)
            case "combine":
                return prompts.combine(parents, history, failure, extra=extra)

    def _parent(self, iteration: int) -> tuple[str, Evaluation]:
        parent = self.tried[iteration]
        assert parent.candidate is not None
        assert parent.evaluation is not None
        return parent.candidate.source, parent.evaluation

    def _more(self, role: Role, iteration: int) -> str:
        return self._extra(role, iteration) if self._extra else ""
