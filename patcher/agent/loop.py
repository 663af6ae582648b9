"""The agent loop on one op: functional passes until a candidate is right, then optimization passes;
the best is kept.

Every question and every verdict is a step of the run, so the loop is a fold over its journal: after
a kill the same call goes on where it stopped, and a reply is stored before it is read. Two agents
as in KForge (arXiv 2606.02963): generation, and an analyst that reads the timings and gives one
recommendation. What is asked together is a round, which a strategy decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from patcher.agent.agents import AdaptPrompt, Agents
from patcher.agent.evaluation import Evaluator, PendingWaits, PrepareRound
from patcher.agent.generation import ExtraText, GeneratedSource, Generator
from patcher.agent.progress import ProgressReporter
from patcher.agent.stopping import StopRules, reason_to_stop, recorded_stop, stop_steps
from patcher.attempts import (
    Attempt,
    KnownKernel,
    LoopResult,
    Progress,
    ReplyFailure,
    Stopped,
)
from patcher.attempts.history import (
    IterationResult,
    LoopHistory,
    RequestRound,
    best_of,
)
from patcher.attempts.structure import structure
from patcher.bench import BudgetError, Candidate, Evaluation, Language, Op, Outcome, Sweep
from patcher.judges import CandidateJudge
from patcher.judges.meter import JudgeMeter
from patcher.models import PROMPT_TOKENS, Model, Role, Usage
from patcher.models.budget import Budget
from patcher.models.client import ModelClient
from patcher.models.replay import RecordingEndedError
from patcher.prompting.extract import WHOLE_FILES
from patcher.prompting.rendering import Prompts
from patcher.runs.run import Run
from patcher.strategies import Refine, Strategy
from patcher.visible import one_line

_ERROR = re.compile(r"\berror\b[^:]*:", re.IGNORECASE)
"""A compiler's line that says what is wrong."""
ScoreFunction = Callable[[int, Evaluation, Mapping[str, str]], float]
"""A user's own measure of a right candidate: (iteration, evaluation, files of the run by what they
are); higher is better."""


def run_loop(
    run: Run,
    op: Op,
    language: Language,
    model: Model,
    judge: CandidateJudge,
    iterations: int,
    device: str,
    *,
    analyst: Model | None = None,
    diagnoser: Model | None = None,
    without: Collection[Role] = (),
    strategy: Strategy | None = None,
    rules: StopRules | None = None,
    sweep: Sweep | None = None,
    budget: Budget | None = None,
    judge_on_gpu: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
    known_kernels: Sequence[KnownKernel] = (),
    pictures: Sequence[str] = (),
    extra: ExtraText | None = None,
    adapt: AdaptPrompt | None = None,
    prepare: PrepareRound | None = None,
    final: bool = False,
    reading: int = WHOLE_FILES,
    score: ScoreFunction | None = None,
    on_event: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> LoopResult:
    """Ask for at most `iterations` candidates and keep the best.

    Args:
        judge: says what one candidate is worth; times it on `sweep`.
        device: what the agents should know of the hardware, in words.
        analyst: the model that analyses; None is `model`.
        diagnoser: the model that judges failures; None is `model`.
        without: advisers that nobody is.
        strategy: decides what to ask next; None is iterative refinement.
        rules: when to leave the op before its iterations are used.
        sweep: the timed points; None is the op's first for the language's kind of device.
        budget: pays for calls and judgements; None is one by the run's own ceilings.
        judge_on_gpu: whether a judgement takes GPU time.
        prompt_tokens: room of a prompt, estimated.
        known_kernels: kernels for this op that work in another language or on another device.
        pictures: PNG files of the run that go to an analyst that sees.
        extra: further text for one question, cut with the rest when a prompt's room is short.
        adapt: the caller's last word on a prompt.
        prepare: told of a round's candidates before they are judged.
        final: what comes after the loop has begun, so that its end stands whatever is given.
        reading: how replies are read in rounds that begin now.
        score: ranks right candidates; None is by speedup.
        on_event: hears of each iteration's stages.
        say: told of calls that failed and are tried again.

    Raises:
        BudgetError: nothing is right and faster yet; the run can be resumed with a larger budget.
        WaitingError, ModelError, MissingError: the run stops here and can be resumed.
        VerificationError: a stored artefact was changed.
    """
    budget = budget or Budget(run)
    kind = "cpu" if language.traits.device == "cpu" else "cuda"
    points = sweep or op.sweep(kind)
    prompts = Prompts(
        op, language, device, points, tokens=prompt_tokens, known_kernels=known_kernels
    )
    models: dict[Role, Model] = {"generate": model}
    advisers: dict[Role, Model] = {"analyse": analyst or model, "diagnose": diagnoser or model}
    models |= {role: each for role, each in advisers.items() if role not in without}
    tell = ProgressReporter(op.name, iterations, budget, on_event)
    history = LoopHistory()
    agents = Agents(run, prompts, models, ModelClient(budget, say=say), adapt, pictures)
    meter = JudgeMeter(budget, on_gpu=judge_on_gpu)
    loop = _Loop(
        run=run,
        op=op,
        language=language,
        history=history,
        generator=Generator(prompts, agents, history, extra, tell),
        evaluator=Evaluator(run, op.name, judge, prepare, meter),
        strategy=strategy or Refine(),
        rules=rules or StopRules(),
        iterations=iterations,
        score=score,
        tell=tell,
        final=final,
        reading=reading,
    )
    found = loop.result(loop.work())
    run.write(f"ops/{op.name}/optimisation.json", found.model_dump_json(indent=1) + "\n")
    return found


@dataclass(frozen=True)
class _Loop:
    run: Run
    op: Op
    language: Language
    history: LoopHistory
    generator: Generator
    evaluator: Evaluator
    strategy: Strategy
    rules: StopRules
    iterations: int
    score: ScoreFunction | None
    tell: ProgressReporter
    final: bool
    reading: int

    def work(self) -> Stopped:
        """Round after round; returns why it ended."""
        number = 0
        while True:
            asked = self._next(number)
            if isinstance(asked, Stopped):
                return asked
            try:
                self._round(number, asked)
            except RecordingEndedError as error:
                if not self.history.attempts:
                    raise
                return self._stop(Stopped(reason="recording_ended", detail=error.message))
            except BudgetError as error:
                # What is worth a patch is taken further; with nothing yet, more money may help.
                if self._worth() is None:
                    raise
                return self._stop(Stopped(reason="budget", detail=error.message))
            number += 1

    def result(self, stopped: Stopped) -> LoopResult:
        best = self._worth()
        evaluation = best.evaluation if best else None
        return LoopResult(
            op=self.op.name,
            language=self.language,
            iterations=tuple(self.history.attempts),
            best_digest=best.candidate.digest if best and best.candidate else None,
            best_iteration=best.iteration if best else None,
            best_speedup=evaluation.geomean_speedup if evaluation else None,
            best_file=self.history.attempts[best.iteration].file if best else None,
            usage=sum((attempt.usage for attempt in self.history.attempts), Usage()),
            strategy=self.strategy.name,
            stopped=stopped.reason,
            stopped_detail=stopped.detail,
        )

    def _worth(self) -> IterationResult | None:
        """The best, if it is right and faster."""
        best = best_of(self.history.results)
        return best if best and best.rank[0] else None

    def _next(self, number: int) -> RequestRound | Stopped:
        """The next round, or the end: decided once, whatever a later version would say."""
        step = f"{self.op.name}/round-{number}"
        if self.run.done(step):
            return self.run.load(step, RequestRound)
        if stopped := self._recorded_stop():
            return stopped
        if stopped := reason_to_stop(self.history.results, self.rules):
            return self._stop(stopped)
        done = len(self.history.results)
        if done >= self.iterations:
            return self._stop(Stopped(reason="iterations", detail=f"{done} candidates"))
        asks = self.strategy.next(tuple(self.history.results), self.iterations - done)
        if not asks:
            detail = f"strategy {self.strategy.name} has nothing more to ask"
            return self._stop(Stopped(reason="asked_all", detail=detail))
        asked = RequestRound(asks=asks, reading=self.reading)
        return self.run.step(step, lambda: asked, RequestRound)

    def _recorded_stop(self) -> Stopped | None:
        return recorded_stop(self.run, self.op.name, final=self.final)

    def _stop(self, stopped: Stopped) -> Stopped:
        done = stopped.model_copy(update={"iterations": len(self.history.results)})
        before = len(stop_steps(self.run, self.op.name))
        step = f"{self.op.name}/stopped" + (f"-{before + 1}" if before else "")
        return self.run.step(step, lambda: done, Stopped)

    def _round(self, number: int, asked: RequestRound) -> None:
        """Ask for all, then judge all. Every prompt is written before a reply is waited for."""
        generated, spent = self._generate(asked)
        candidates = {}
        for one in generated:
            if isinstance(one.source, str):
                self.tell(one.iteration, "evaluate", one.ask.phase)
                candidates[one.iteration] = self._candidate(one.iteration, one.source)
        evaluations = self.evaluator.evaluate(candidates)
        for one in generated:
            verdict = evaluations.by_iteration.get(one.iteration)
            if one.iteration in candidates and verdict is None:
                break
            self._done(number, one, candidates.get(one.iteration), verdict)
        if spent := spent or evaluations.spent:
            raise spent

    def _generate(self, asked: RequestRound) -> tuple[list[GeneratedSource], BudgetError | None]:
        """What was asked for, and why the last ones were not. What goes out in a batch goes out
        together: the advice of a round, then its questions for a source.

        Raises:
            WaitingError: something has not been answered.
        """
        stopped = self._recorded_stop()
        while True:
            waits, generated, spent = PendingWaits(), list[GeneratedSource](), None
            for iteration, ask in enumerate(asked.asks, len(self.history.results)):
                if stopped and iteration >= stopped.iterations:
                    break  # it ended in the midst of this round
                try:
                    with waits.collect():
                        generated.append(self.generator.generate(iteration, ask, asked.reading))
                except BudgetError as error:
                    spent = error  # what is paid for is judged all the same
                    break
            if not waits.errors or not self.generator.answered():
                waits.settle()
                return generated, spent

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
        one: GeneratedSource,
        candidate: Candidate | None,
        verdict: tuple[int, Evaluation] | None,
    ) -> None:
        """The iteration as it stays."""
        given_in, evaluation = verdict or (None, None)
        failure = one.source if isinstance(one.source, ReplyFailure) else None
        tried = IterationResult(one.iteration, number, one.ask, candidate, evaluation, failure)
        if self.score and tried.right and candidate and evaluation and given_in is not None:
            files = {
                "run": ".",
                "candidate": self._file(given_in, candidate),
                "evaluation": f"ops/{self.op.name}/{given_in}/evaluation.json",
            }
            tried = replace(tried, score=self.score(given_in, evaluation, files))
        self.history.results.append(tried)
        attempt = Attempt(
            iteration=one.iteration,
            round=number,
            phase=one.ask.phase,
            parents=one.ask.parents,
            digest=candidate.digest if candidate else None,
            outcome=evaluation.outcome if evaluation else Outcome.GENERATION_FAILURE,
            geomean_speedup=evaluation.geomean_speedup if evaluation else None,
            score=tried.score,
            detail=_detail(evaluation, tried.score)
            if evaluation
            else failure.detail
            if failure
            else "",
            usage=one.advice.usage + one.reply.usage,
            model=one.reply.model,
            repairs=one.advice.repairs + one.reply.repairs,
            reply_source=one.reply.source,
            recommendation=one.advice.recommendation,
            diagnosis=one.advice.diagnosis,
            analysis_failure=one.advice.missing,
            duplicate_of=None if given_in == one.iteration else given_in,
            file=self._file(one.iteration, candidate) if candidate else None,
            structure=structure(candidate).key if candidate else None,
            island=one.ask.island,
            why=one.ask.why,
        )
        self.history.attempts.append(attempt)
        file = f"ops/{self.op.name}/{one.iteration}/attempt.json"
        self.run.write(file, attempt.model_dump_json(indent=1) + "\n")
        self.tell(one.iteration, "done", one.ask.phase, attempt)


def _detail(evaluation: Evaluation, score: float | None) -> str:
    if evaluation.geomean_speedup is not None:
        own = "" if score is None else f", score {score:g}"
        return f"{evaluation.geomean_speedup:.3f} x {evaluation.baseline}{own}"
    failed = evaluation.failed_checks
    if failed and evaluation.outcome is Outcome.COMPILATION_FAILURE:
        errors = (line for line in evaluation.log.splitlines() if _ERROR.search(line))
        if first := next(errors, None):  # says more than the command that failed
            return f"{failed[0].name}: {one_line(first, 200)}"
    return (
        f"{failed[0].name}: {failed[0].detail}" if failed else evaluation.outcome.replace("_", " ")
    )
