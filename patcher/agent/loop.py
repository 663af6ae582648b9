"""The agent loop on one op: functional passes until a candidate is right, then optimisation passes;
the best is kept.

Every question and every verdict is a step of the run, so the loop is a fold over its journal: after
a kill the same call goes on where it stopped, and a reply is stored before it is read. Two agents
as in KForge (arXiv 2606.02963): generation, and an analyst that reads the timings and gives one
recommendation. What is asked together is a round, which a strategy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from bench import (
    BudgetError,
    Candidate,
    Evaluation,
    Language,
    Op,
    Outcome,
    Sweep,
    VerificationError,
)
from patcher.agent.asking import Asking, Edit
from patcher.agent.judging import Judge, Judging, Prepare
from patcher.agent.moving_on import move_on
from patcher.agent.waiting import Waiting
from patcher.attempts import Attempt, Optimisation, Phase, Progress, Recommendation, Stage, Stop
from patcher.extract import Failure, extract_json, extract_source, unusable
from patcher.models import Model, Reply, Usage
from patcher.models.replay import RecordingEndedError
from patcher.prompting import Prompts
from patcher.run import Run
from patcher.strategies import Refine, Strategy
from patcher.tried import Ask, Round, Tried, best_of

Score = Callable[[int, Evaluation, Mapping[str, str]], float]
"""A user's own measure of a right candidate: (iteration, evaluation, files of the run by what they
are); higher is better."""


def optimize(
    run: Run,
    op: Op,
    language: Language,
    model: Model,
    judge: Judge,
    iterations: int,
    device: str,
    *,
    analyst: Model | None = None,
    strategy: Strategy | None = None,
    sweep: Sweep | None = None,
    budget_usd: float | None = None,
    prepare: Prepare | None = None,
    edit: Edit | None = None,
    score: Score | None = None,
    on_event: Callable[[Progress], None] | None = None,
) -> Optimisation:
    """Ask for at most `iterations` candidates and keep the best.

    Args:
        judge: says what one candidate is worth; times it on `sweep`.
        device: what the agents should know of the hardware, in words.
        analyst: the model that analyses; None is `model`.
        strategy: decides what to ask next; None is iterative refinement.
        sweep: the timed points; None is the op's first for the language's kind of device.
        budget_usd: ceiling on what the models of this run may cost, all ops together.
        prepare: told of a round's candidates before they are judged.
        edit: what is sent in place of a prompt.
        score: ranks right candidates; None is by speedup.

    Raises:
        BudgetError, WaitingError, ModelError, MissingError: the run stops here and can be resumed.
        VerificationError: a stored artefact was changed.
    """
    kind = "cpu" if language is Language.CPP else "cuda"
    prompts = Prompts(op, language, device, sweep or op.sweep(kind))
    loop = _Loop(
        run=run,
        op=op,
        language=language,
        prompts=prompts,
        ask=Asking(
            run,
            prompts,
            {"generate": model, "analyse": analyst or model},
            budget_usd=budget_usd,
            edit=edit,
        ),
        judge=Judging(run, op.name, judge, prepare),
        strategy=strategy or Refine(),
        iterations=iterations,
        score=score,
        on_event=on_event,
    )
    found = loop.optimisation(loop.work())
    run.write(f"ops/{op.name}/optimisation.json", found.model_dump_json(indent=1) + "\n")
    return found


def best_candidate(run: Run, optimisation: Optimisation) -> Candidate | None:
    """The best candidate of a finished loop, from its file in the run.

    Raises:
        VerificationError: the file is missing or was changed.
    """
    if optimisation.best_file is None:
        return None
    hint = "restore the run from a copy, or start a new one"
    try:
        # Bytes: reading as text would change line ends, and so the digest.
        source = (run.path / optimisation.best_file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{optimisation.best_file} cannot be read", hint) from error
    candidate = Candidate(op=optimisation.op, language=optimisation.language, source=source)
    if candidate.digest != optimisation.best_digest:
        raise VerificationError(f"{optimisation.best_file} was changed after it was judged", hint)
    return candidate


@dataclass(frozen=True)
class _Written:
    """One iteration whose reply has come."""

    iteration: int
    ask: Ask
    reply: Reply
    source: str | Failure
    usage: Usage
    recommendation: Recommendation | None = None
    analysis_failure: str | None = None


@dataclass
class _Loop:
    run: Run
    op: Op
    language: Language
    prompts: Prompts
    ask: Asking
    judge: Judging
    strategy: Strategy
    iterations: int
    score: Score | None
    on_event: Callable[[Progress], None] | None
    tried: list[Tried] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    def work(self) -> Stop:
        """Round after round; returns why it ended."""
        number = 0
        while True:
            left = self.iterations - len(self.tried)
            if reason := move_on(self.tried):
                return reason
            if left <= 0:
                return "iterations"
            asks = self._decide(number, left)
            if not asks:
                return "asked_all"
            try:
                self._round(number, asks)
            except RecordingEndedError:
                if not self.attempts:
                    raise
                return "recording_ended"
            number += 1

    def optimisation(self, stopped: Stop) -> Optimisation:
        best = best_of(self.tried)
        if best and (best.evaluation is None or best.evaluation.outcome is not Outcome.CORRECT):
            best = None
        return Optimisation(
            op=self.op.name,
            language=self.language,
            iterations=tuple(self.attempts),
            best_digest=best.candidate.digest if best and best.candidate else None,
            best_iteration=best.iteration if best else None,
            best_speedup=best.evaluation.geomean_speedup if best and best.evaluation else None,
            best_file=self.attempts[best.iteration].file if best else None,
            usage=self.ask.usage,
            stopped=stopped,
        )

    def _decide(self, number: int, left: int) -> tuple[Ask, ...]:
        """What the strategy wants; decided once, whatever a later version would say."""
        asks = self.strategy.next(tuple(self.tried), left)
        if not asks:
            return ()
        return self.run.step(f"{self.op.name}/round-{number}", lambda: Round(asks=asks), Round).asks

    def _round(self, number: int, asks: Sequence[Ask]) -> None:
        """Ask for all, then judge all. Every prompt is written before a reply is waited for."""
        waiting, written = Waiting(), list[_Written]()
        spent: BudgetError | None = None
        for iteration, ask in enumerate(asks, len(self.tried)):
            try:
                with waiting.begun():
                    written.append(self._written(iteration, ask))
            except BudgetError as error:
                spent = error  # what is paid for is judged all the same
                break
        waiting.settle()
        candidates = {}
        for one in written:
            if isinstance(one.source, str):
                self._tell(one.iteration, "evaluate", one.ask.phase)
                candidates[one.iteration] = self._candidate(one.iteration, one.source)
        verdicts = self.judge(candidates)
        for one in written:
            self._done(number, one, candidates.get(one.iteration), verdicts.get(one.iteration))
        if spent:
            raise spent

    def _written(self, iteration: int, ask: Ask) -> _Written:
        """Perhaps analyse, then generate."""
        found: Recommendation | Failure | None = None
        usage = Usage()
        if ask.kind == "optimise":
            found, usage = self._analyse(iteration, ask)
        recommendation = found if isinstance(found, Recommendation) else None
        self._tell(iteration, "generate", ask.phase)
        reply = self.ask(iteration, "generate", self._prompt(ask, recommendation))
        return _Written(
            iteration=iteration,
            ask=ask,
            reply=reply,
            source=unusable(reply) or extract_source(reply.text, self.language, self.op.name),
            usage=usage + reply.usage,
            recommendation=recommendation,
            analysis_failure=found.detail if isinstance(found, Failure) else None,
        )

    def _prompt(self, ask: Ask, recommendation: Recommendation | None) -> str:
        failure = self.tried[ask.after].failure if ask.after is not None else None
        if ask.kind == "generate":
            return self.prompts.generate(failure)
        source, evaluation = self._parent(ask)
        if ask.kind == "repair":
            return self.prompts.repair(source, evaluation, failure)
        return self.prompts.optimise(source, evaluation, recommendation, self.attempts, failure)

    def _parent(self, ask: Ask) -> tuple[str, Evaluation]:
        parent = self.tried[ask.parents[0]]
        assert parent.candidate is not None
        assert parent.evaluation is not None
        return parent.candidate.source, parent.evaluation

    def _analyse(self, iteration: int, ask: Ask) -> tuple[Recommendation | Failure, Usage]:
        self._tell(iteration, "analyse", ask.phase)
        source, evaluation = self._parent(ask)
        prompt = self.prompts.analyse(source, evaluation, self.attempts)
        reply = self.ask(iteration, "analyse", prompt)
        found = unusable(reply) or extract_json(reply.text, "change")
        if isinstance(found, dict):
            known = {name: found[name] for name in Recommendation.model_fields if name in found}
            try:
                return Recommendation.model_validate(known), reply.usage
            except ValidationError as error:
                first = error.errors()[0]
                detail = f"the recommendation does not fit: {first['loc'][0]}: {first['msg']}"
                found = Failure(kind="no_json", detail=detail)
        return found, reply.usage

    def _candidate(self, iteration: int, source: str) -> Candidate:
        candidate = Candidate(op=self.op.name, language=self.language, source=source)
        self.run.write(self._file(iteration, candidate), source)
        return candidate

    def _file(self, iteration: int, candidate: Candidate) -> str:
        suffix = candidate.file_name.removeprefix(self.op.name)
        return f"ops/{self.op.name}/{iteration}/candidate{suffix}"

    def _done(
        self,
        number: int,
        one: _Written,
        candidate: Candidate | None,
        verdict: tuple[int, Evaluation] | None,
    ) -> None:
        """The iteration as it stays."""
        given_in, evaluation = verdict or (None, None)
        failure = one.source if isinstance(one.source, Failure) else None
        tried = Tried(one.iteration, number, one.ask, candidate, evaluation, failure)
        if self.score and tried.right and candidate and evaluation and given_in is not None:
            folder = f"ops/{self.op.name}/{given_in}"
            files = {
                "candidate": self._file(given_in, candidate),
                "evaluation": f"{folder}/evaluation.json",
            }
            tried = replace(tried, score=self.score(given_in, evaluation, files))
        self.tried.append(tried)
        attempt = Attempt(
            iteration=one.iteration,
            round=number,
            phase=one.ask.phase,
            parents=one.ask.parents,
            digest=candidate.digest if candidate else None,
            outcome=evaluation.outcome if evaluation else Outcome.GENERATION_FAILURE,
            geomean_speedup=evaluation.geomean_speedup if evaluation else None,
            score=tried.score,
            detail=_detail(evaluation) if evaluation else failure.detail if failure else "",
            usage=one.usage,
            model=one.reply.model,
            reply_source=one.reply.source,
            recommendation=one.recommendation,
            analysis_failure=one.analysis_failure,
            duplicate_of=None if given_in == one.iteration else given_in,
            file=self._file(one.iteration, candidate) if candidate else None,
        )
        self.attempts.append(attempt)
        file = f"ops/{self.op.name}/{one.iteration}/attempt.json"
        self.run.write(file, attempt.model_dump_json(indent=1) + "\n")
        self._tell(one.iteration, "done", one.ask.phase, attempt)

    def _tell(
        self, iteration: int, stage: Stage, phase: Phase, attempt: Attempt | None = None
    ) -> None:
        if self.on_event:
            self.on_event(
                Progress(
                    op=self.op.name,
                    iteration=iteration,
                    iterations=self.iterations,
                    stage=stage,
                    phase=phase,
                    attempt=attempt,
                )
            )


def _detail(evaluation: Evaluation) -> str:
    if evaluation.geomean_speedup is not None:
        return f"{evaluation.geomean_speedup:.3f} x {evaluation.baseline}"
    failed = evaluation.failed_checks
    return (
        f"{failed[0].name}: {failed[0].detail}" if failed else evaluation.outcome.replace("_", " ")
    )
