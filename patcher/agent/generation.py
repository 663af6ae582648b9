"""From a request to a candidate's source: perhaps advice, then the question, then what the reply
holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from patcher.agent.agents import Advice, Agents
from patcher.attempts import Phase, ReplyFailure, Stage
from patcher.attempts.history import CandidateRequest, LoopHistory
from patcher.bench import Evaluation
from patcher.models import Reply, Role
from patcher.prompting.extract import LONGEST_SOURCE, extract_source, unusable
from patcher.prompting.rendering import Prompts

ExtraText = Callable[[Role, int], str]
"""Text for the question of this role in this iteration: memory, a user's own sources."""
TellStage = Callable[[int, Stage, Phase], None]


@dataclass(frozen=True)
class GeneratedSource:
    """One iteration whose reply has come."""

    iteration: int
    ask: CandidateRequest
    advice: Advice
    reply: Reply
    source: str | ReplyFailure


class Generator:
    """The agents at work for one request at a time.

    Args:
        history: all iterations so far; the loop adds to it.
        extra: further text for one question.
        tell: hears what is being done.
    """

    def __init__(
        self,
        prompts: Prompts,
        agents: Agents,
        history: LoopHistory,
        extra: ExtraText | None,
        tell: TellStage,
    ) -> None:
        self._prompts = prompts
        self._agents = agents
        self._history = history
        self._extra = extra
        self._tell = tell

    def answered(self) -> bool:
        """Send what waits for a batch. True: answers have come, so generate the round again."""
        return self._agents.answered()

    def generate(self, iteration: int, ask: CandidateRequest, reading: int) -> GeneratedSource:
        """The source that this request gives.

        Args:
            reading: of `RequestRound`.

        Raises:
            BudgetError, WaitingError, ModelError, MissingError: the reply has not come.
        """
        advice = self._advice(iteration, ask)
        self._tell(iteration, "generate", ask.phase)
        reply = self._agents.ask(iteration, "generate", self._question(iteration, ask, advice))
        prompts = self._prompts
        longest = min(LONGEST_SOURCE, prompts.room * 2 // 3)
        source = unusable(reply) or extract_source(
            reply.text, prompts.language, prompts.op.name, longest, reading=reading
        )
        return GeneratedSource(iteration, ask, advice, reply, source)

    def _advice(self, iteration: int, ask: CandidateRequest) -> Advice:
        if ask.kind == "optimise":
            self._tell(iteration, "analyse", ask.phase)
            source, evaluation = self._parent(ask.parents[0])
            prompt = self._prompts.analyse(
                source,
                evaluation,
                self._history.attempts,
                pictures=self._agents.pictures,
                extra=self._text("analyse", iteration),
            )
            return self._agents.recommend(iteration, prompt)
        if ask.kind == "repair":
            self._tell(iteration, "diagnose", ask.phase)
            source, evaluation = self._parent(ask.parents[0])
            extra = self._text("diagnose", iteration)
            prompt = self._prompts.diagnose(source, evaluation, extra=extra)
            return self._agents.diagnose(iteration, prompt)
        return Advice()

    def _question(self, iteration: int, ask: CandidateRequest, advice: Advice) -> str:
        history, prompts = self._history, self._prompts
        failure = history.results[ask.after].failure if ask.after is not None else None
        parents = [self._parent(parent) for parent in ask.parents]
        extra = self._text("generate", iteration)
        match ask.kind:
            case "generate":
                known = [(history.attempts[at], self._parent(at)[0]) for at in ask.unlike]
                return prompts.generate(failure, draw=ask.draw, unlike=known, extra=extra)
            case "repair":
                source, evaluation = parents[0]
                return prompts.repair(
                    source,
                    evaluation,
                    failure,
                    diagnosis=advice.diagnosis,
                    again=history.attempts[ask.parents[0]].duplicate_of is not None,
                    extra=extra,
                )
            case "optimise":
                source, evaluation = parents[0]
                said = advice.recommendation
                return prompts.optimize(
                    source, evaluation, said, history.attempts, failure, extra=extra
                )
            case "combine":
                return prompts.combine(parents, history.attempts, failure, extra=extra)

    def _parent(self, iteration: int) -> tuple[str, Evaluation]:
        parent = self._history.results[iteration]
        assert parent.candidate is not None
        assert parent.evaluation is not None
        return parent.candidate.source, parent.evaluation

    def _text(self, role: Role, iteration: int) -> str:
        return self._extra(role, iteration) if self._extra else ""
