"""The agent loop on one op: functional passes until a candidate is right, then optimisation passes;
the best is kept.

Every question and every verdict is a step of the run, so the loop is a fold over its journal: after
a kill the same
call goes on where it stopped, and a reply is stored before it is read. Two agents as in KForge
(arXiv 2606.02963): generation, and an analyst that reads the timings and gives one recommendation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import ValidationError

from bench import (
    Candidate,
    Evaluation,
    Language,
    Op,
    Outcome,
    Sweep,
    VerificationError,
)
from patcher.attempts import Attempt, Optimisation, Phase, Progress, Recommendation, Stage, Stop
from patcher.extract import Failure, extract_json, extract_source, unusable
from patcher.models import Asked, Model, Request, Role, Usage
from patcher.models.budget import ask
from patcher.models.replay import RecordingEndedError
from patcher.prompting import Prompts
from patcher.run import Run

MAX_FUNCTIONAL_FAILURES = 5
"""Functional passes in a row that may fail before the loop gives the op up."""
MAX_REPAIRS = 1
"""Functional passes spent on an optimised candidate that broke, before going back to the best
one."""
MAX_TOKENS: dict[Role, int] = {"generate": 32_000, "analyse": 16_000}
"""Room for a reply, thinking included; doubled after a reply that was cut off."""
TOKENS_CEILING = 128_000


@dataclass(frozen=True)
class _Tried:
    iteration: int
    candidate: Candidate
    evaluation: Evaluation

    @property
    def right(self) -> bool:
        return self.evaluation.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)

    @property
    def rank(self) -> tuple[bool, float]:
        return self.evaluation.outcome is Outcome.CORRECT, self.evaluation.geomean_speedup or 0.0


def optimize(
    run: Run,
    op: Op,
    language: Language,
    model: Model,
    judge: Callable[[Candidate], Evaluation],
    iterations: int,
    device: str,
    *,
    analyst: Model | None = None,
    sweep: Sweep | None = None,
    budget_usd: float | None = None,
    on_event: Callable[[Progress], None] | None = None,
) -> Optimisation:
    """Ask for at most `iterations` candidates and keep the best.

    Args:
        judge: says what one candidate is worth; times it on `sweep`.
        device: what the agents should know of the hardware, in words.
        analyst: the model that analyses; None is `model`.
        sweep: the timed points; None is the op's first for the language's kind of device.
        budget_usd: ceiling on what the models of this run may cost, all ops together.

    Raises:
        BudgetError, WaitingError, ModelError, MissingError: the run stops here and can be resumed.
        VerificationError: a stored artefact was changed.
    """
    kind = "cpu" if language is Language.CPP else "cuda"
    prompts = Prompts(op, language, device, sweep or op.sweep(kind))
    loop = _Loop(
        run, op, language, prompts, model, analyst or model, judge, iterations, budget_usd, on_event
    )
    stopped: Stop = "iterations"
    for iteration in range(iterations):
        try:
            loop.attempt(iteration)
        except RecordingEndedError:
            if not loop.attempts:
                raise
            stopped = "recording_ended"
            break
        if loop.attempts[-1].outcome is Outcome.COMPILED:
            stopped = "compiled"  # nothing here can say more of it
            break
        if loop.failures >= MAX_FUNCTIONAL_FAILURES:
            stopped = "functional_failures"
            break
    found = loop.optimisation(stopped)
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
class _Plan:
    """What one iteration will ask."""

    phase: Phase
    prompt: str
    usage: Usage = field(default_factory=Usage)
    """Of the analysis."""
    recommendation: Recommendation | None = None
    analysis_failure: str | None = None


@dataclass
class _Loop:
    run: Run
    op: Op
    language: Language
    prompts: Prompts
    model: Model
    analyst: Model
    judge: Callable[[Candidate], Evaluation]
    iterations: int
    budget_usd: float | None
    on_event: Callable[[Progress], None] | None
    attempts: list[Attempt] = field(default_factory=list)
    judged: dict[str, _Tried] = field(default_factory=dict)
    best: _Tried | None = None
    broken: _Tried | None = None
    """The last candidate, when it is not right."""
    failure: Failure | None = None
    """Why the last reply could not be used."""
    failures: int = 0
    """Functional passes failed in a row."""
    repairs: int = 0
    room: dict[Role, int] = field(default_factory=lambda: dict(MAX_TOKENS))

    def attempt(self, iteration: int) -> None:
        """One iteration: perhaps analyse, generate, judge."""
        plan = self._plan(iteration)
        phase = plan.phase
        self._tell(iteration, "generate", phase)
        reply = self._ask(iteration, "generate", plan.prompt, self.model).reply
        source_or_failure = unusable(reply) or extract_source(
            reply.text, self.language, self.op.name
        )
        tried = file = duplicate_of = None
        if isinstance(source_or_failure, Failure):
            outcome, detail = Outcome.GENERATION_FAILURE, source_or_failure.detail
            self.failure = source_or_failure
        else:
            self._tell(iteration, "evaluate", phase)
            candidate = Candidate(op=self.op.name, language=self.language, source=source_or_failure)
            suffix = candidate.file_name.removeprefix(self.op.name)
            file = f"{self._folder(iteration)}/candidate{suffix}"
            self.run.write(file, candidate.source)
            tried = self._judge(iteration, candidate)
            if tried.iteration != iteration:
                duplicate_of = tried.iteration
            outcome, detail = tried.evaluation.outcome, _detail(tried.evaluation)
            self.failure = None
        self._count(phase, tried)
        attempt = Attempt(
            iteration=iteration,
            phase=phase,
            digest=tried.candidate.digest if tried else None,
            outcome=outcome,
            geomean_speedup=tried.evaluation.geomean_speedup if tried else None,
            detail=detail,
            usage=plan.usage + reply.usage,
            model=reply.model,
            reply_source=reply.source,
            recommendation=plan.recommendation,
            analysis_failure=plan.analysis_failure,
            duplicate_of=duplicate_of,
            file=file,
        )
        self.attempts.append(attempt)
        text = attempt.model_dump_json(indent=1) + "\n"
        self.run.write(f"{self._folder(iteration)}/attempt.json", text)
        self._tell(iteration, "done", phase, attempt)

    def optimisation(self, stopped: Stop) -> Optimisation:
        best = self.best if self.best and self.best.evaluation.outcome is Outcome.CORRECT else None
        usage = Usage()
        for attempt in self.attempts:
            usage += attempt.usage
        return Optimisation(
            op=self.op.name,
            language=self.language,
            iterations=tuple(self.attempts),
            best_digest=best.candidate.digest if best else None,
            best_iteration=best.iteration if best else None,
            best_speedup=best.evaluation.geomean_speedup if best else None,
            best_file=self.attempts[best.iteration].file if best else None,
            usage=usage,
            stopped=stopped,
        )

    def _plan(self, iteration: int) -> _Plan:
        """Repair what is broken, begin, or improve the best."""
        broken, best = self.broken, self.best
        if broken and (best is None or self.repairs < MAX_REPAIRS):
            source, evaluation = broken.candidate.source, broken.evaluation
            return _Plan("functional", self.prompts.repair(source, evaluation, self.failure))
        if best is None:
            return _Plan("functional", self.prompts.generate(self.failure))
        found, usage = self._analyse(iteration, best)
        recommendation = found if isinstance(found, Recommendation) else None
        prompt = self.prompts.optimise(
            best.candidate.source, best.evaluation, recommendation, self.attempts, self.failure
        )
        missing = found.detail if isinstance(found, Failure) else None
        return _Plan("optimisation", prompt, usage, recommendation, missing)

    def _count(self, phase: Phase, tried: _Tried | None) -> None:
        """What this iteration changes for the next one."""
        right = tried is not None and tried.right
        if phase == "optimisation":
            self.failures = self.repairs = 0
            self.broken = None
        else:
            self.failures = 0 if right else self.failures + 1
            self.repairs += 1
        if tried is None:
            return  # a candidate that was being repaired still is
        self.broken = None if right else tried
        if right and (self.best is None or tried.rank > self.best.rank):
            self.best = tried

    def _analyse(self, iteration: int, best: _Tried) -> tuple[Recommendation | Failure, Usage]:
        self._tell(iteration, "analyse", "optimisation")
        prompt = self.prompts.analyse(best.candidate.source, best.evaluation, self.attempts)
        reply = self._ask(iteration, "analyse", prompt, self.analyst).reply
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

    def _ask(self, iteration: int, role: Role, prompt: str, model: Model) -> Asked:
        """Ask once, ever: the step's artefact is the question and the answer as they were."""
        step = f"{self.op.name}/{iteration}/ask-{role}"
        request = Request(
            step=step,
            role=role,
            system=self.prompts.system(role),
            prompt=prompt,
            max_tokens=self.room[role],
        )
        folder = self._folder(iteration)
        if not self.run.done(step):
            self.run.write(f"{folder}/{role}.prompt.md", _shown(request))
        asked = ask(self.run, model, request, self.budget_usd)
        self.run.write(f"{folder}/{role}.prompt.md", _shown(asked.request))
        self.run.write(f"{folder}/{role}.reply.md", asked.reply.text)
        if asked.reply.truncated:
            self.room[role] = min(2 * asked.request.max_tokens, TOKENS_CEILING)
        return asked

    def _judge(self, iteration: int, candidate: Candidate) -> _Tried:
        """The verdict on a candidate; the same source is judged once."""
        if candidate.digest in self.judged:
            return self.judged[candidate.digest]
        step = f"{self.op.name}/{iteration}/evaluate"
        evaluation = self.run.step(step, lambda: self.judge(candidate), Evaluation)
        if (evaluation.op, evaluation.digest) != (self.op.name, candidate.digest):
            raise VerificationError(
                f"the evaluation of iteration {iteration} is of another candidate",
                "start a new run",
            )
        self.run.write(
            f"{self._folder(iteration)}/evaluation.json",
            evaluation.model_dump_json(indent=1) + "\n",
        )
        self.judged[candidate.digest] = _Tried(iteration, candidate, evaluation)
        return self.judged[candidate.digest]

    def _folder(self, iteration: int) -> str:
        return f"ops/{self.op.name}/{iteration}"

    def _tell(
        self,
        iteration: int,
        stage: Stage,
        phase: Phase,
        attempt: Attempt | None = None,
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


def _shown(request: Request) -> str:
    return f"<!-- system -->\n{request.system}\n<!-- prompt -->\n{request.prompt}"
